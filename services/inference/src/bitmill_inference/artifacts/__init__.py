"""From a URI to a verified model directory on this host."""
