"""What several test folders share: fakes behind the ports, small checkpoints, servers."""
