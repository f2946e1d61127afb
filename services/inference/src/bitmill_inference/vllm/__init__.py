"""The adapter of vLLM: engines, and the processes that they run in."""
