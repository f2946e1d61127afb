"""bitmill: client stubs, typed clients and the command line."""
