"""What phases took where they were measured: the basis of time estimates on a server that has finished no job yet."""

from __future__ import annotations

from bitmill_common.artifact import Device
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.plans.durations import Rates, Reference

# From the processor time of the llmcompressor engine on SmolLM2-135M and on a random Llama of 0.49 billion parameters,
# each with few and with many tokens; two threads count for 1.6 of one, and for 1.8 in the part of each token.
# Files: SHA-256 of each byte, and a copy on a local disk. VERIFY: a start of vLLM with a small model.
_CPU = {
    (JobPhase.FETCH, "file"): Rates(byte_s=9e-10),
    (JobPhase.QUANTIZE, "RTN by llmcompressor on cpu"): Rates(start_s=6, parameter_s=1.1e-7),
    (JobPhase.QUANTIZE, "GPTQ by llmcompressor on cpu"): Rates(6, parameter_s=2.5e-7, parameter_token_s=3.1e-11),
    (JobPhase.QUANTIZE, "CALIBRATE by llmcompressor on cpu"): Rates(6, parameter_s=2.3e-8, parameter_token_s=2.8e-11),
    (JobPhase.EVALUATE, "llmcompressor on cpu"): Rates(6, parameter_s=2.5e-8, parameter_token_s=4.4e-11),
    (JobPhase.SAVE, ""): Rates(byte_s=9e-10),
    (JobPhase.VERIFY, "cpu"): Rates(start_s=30),
    (JobPhase.UPLOAD, "file"): Rates(byte_s=3e-9),
}

# benchmarks/results/quantization-speed-cuda.json: 8.03 billion parameters and 1,048,576 tokens in 108.8 s, and 38.1 s
# to load, to check and to save.
_H200 = {
    (JobPhase.QUANTIZE, "GPTQ by llmcompressor on cuda"): Rates(parameter_s=4.7e-9, parameter_token_s=1.29e-14),
}

REFERENCES: dict[Device, Reference] = {
    Device.CPU: Reference("2 cores of an Intel Xeon at 2.3 GHz with AVX-512", _CPU),
    Device.CUDA: Reference("one NVIDIA H200", _H200),
}
