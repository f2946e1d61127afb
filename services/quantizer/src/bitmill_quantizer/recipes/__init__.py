"""What a caller may ask for: drafts, their rules and defaults, what each scheme and each engine is."""
