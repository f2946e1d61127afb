"""Jobs: their phases, their durable queue, their history."""
