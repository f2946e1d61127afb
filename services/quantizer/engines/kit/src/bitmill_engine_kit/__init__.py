"""What bitmill's quantization engines share: protocol, process, calibration data, evaluation. Only that needs torch."""
