"""What every quantization engine of bitmill shares: the protocol, the process, calibration data. Needs no torch."""
