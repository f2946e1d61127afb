"""Generated stubs of bitmill.quantizer.v1."""
