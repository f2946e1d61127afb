"""What both bitmill services share: errors, object store, artifacts, server scaffolding, logging."""
