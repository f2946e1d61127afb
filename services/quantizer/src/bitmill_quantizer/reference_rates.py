"""What phases took where they were measured: the basis of time estimates on a server that has finished no job yet."""

from __future__ import annotations

from bitmill_common.artifact import Device
from bitmill_quantizer.durations import Rates, Reference
from bitmill_quantizer.jobs import JobPhase

_CPU: dict[tuple[JobPhase, str], Rates] = {}

# benchmarks/results/quantization-speed-cuda.json: 8.03 billion parameters and 1,048,576 tokens in 108.8 s, and 38.1 s
# to load, to check and to save.
_H200 = {
    (JobPhase.QUANTIZE, "GPTQ by llmcompressor on cuda"): Rates(parameter_s=4.7e-9, parameter_token_s=1.29e-14),
}

REFERENCES: dict[Device, Reference] = {
    Device.CPU: Reference("2 cores of an Intel Xeon with AMX", _CPU),
    Device.CUDA: Reference("one NVIDIA H200", _H200),
}
