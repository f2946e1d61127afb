"""The dry run: what a job would do, take and run into, from headers alone."""
