"""The quantization engine over llm-compressor: a child process, request JSON in, events out."""
