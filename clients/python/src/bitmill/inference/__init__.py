"""The proto package bitmill.inference."""
