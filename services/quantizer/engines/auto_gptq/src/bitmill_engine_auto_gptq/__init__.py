"""Quantization engine of bitmill over AutoGPTQ."""
