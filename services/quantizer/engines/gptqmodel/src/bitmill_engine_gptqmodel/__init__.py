"""Quantization engine of bitmill over GPTQModel."""
