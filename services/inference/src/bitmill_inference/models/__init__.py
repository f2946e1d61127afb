"""The models of this server: loading, names, adapters, sleep, restarts."""
