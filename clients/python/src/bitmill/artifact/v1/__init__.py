"""Generated stubs of bitmill.artifact.v1."""
