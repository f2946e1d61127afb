"""The bitmill quantizer: durable quantization jobs and their artifacts over gRPC."""
