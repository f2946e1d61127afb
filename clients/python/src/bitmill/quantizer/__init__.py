"""The proto package bitmill.quantizer."""
