"""Generated stubs of bitmill.inference.v1."""
