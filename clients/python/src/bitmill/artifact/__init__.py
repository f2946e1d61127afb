"""The proto package bitmill.artifact."""
