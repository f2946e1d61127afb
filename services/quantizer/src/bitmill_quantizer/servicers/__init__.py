"""The gRPC edge: convert, call, convert."""
