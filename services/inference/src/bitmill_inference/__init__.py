"""The inference service: artifacts in vLLM's AsyncLLM, streamed over gRPC."""
