"""Engines and the verifier as child processes."""
