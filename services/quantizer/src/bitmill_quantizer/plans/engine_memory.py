"""The memory that an engine's process needs at its peak, on the host and on the GPU. Pure.

Fitted to peaks of the llmcompressor engine on the CPU, for models of 135 and 490 million parameters, and on an H200 for
one of 8 billion (benchmarks/results/quantization-speed-cuda.json), to be above each of them by up to a third.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bitmill_common.recipes import Algorithm, Scheme, Treatment
from bitmill_quantizer.plans.treatments import Shapes

_FLOAT_BYTES = 4
_ACTIVATION_BYTES = 2
# Python, torch and transformers themselves, before any weight is loaded; and CUDA with its libraries on the GPU.
_RUNTIME_BYTES = 700 << 20
_CUDA_RUNTIME_BYTES = 1 << 30
# `plan_batches` in the engine's calibration_cuda.py.
_MAX_BATCH_SIZE = 32
_USABLE_FRACTION = 0.6
_DECODER_LAYER = re.compile(r".*\blayers\.\d+\.")


@dataclass(frozen=True)
class Workload:
    """What an engine holds. `weights_bytes`: of the whole model in 16 bits; `artifact_bytes`: of what is made of it.

    The sizes of the config are 0 where not known. `num_samples` is 0 for a recipe that reads no data; `length`: tokens
    in a sample, and in an evaluation's window.
    """

    layers: Shapes
    quantized: Mapping[str, Treatment]
    weights_bytes: int
    artifact_bytes: int
    hidden_size: int
    intermediate_size: int
    vocabulary_size: int
    num_decoder_layers: int
    num_samples: int
    length: int


def host_memory_bytes(work: Workload, available_device_bytes: int = 0) -> int:
    """Returns the larger of two peaks: that of quantizing and saving, and that of comparing two models.

    `available_device_bytes`: the GPU's memory; 0 where the engine works on the CPU.
    """
    quantizing = work.weights_bytes + max(_rounding_bytes(work), work.weights_bytes)
    if not _keeps_on_device(work, available_device_bytes):
        quantizing += _kept_bytes(work) + _working_bytes(work)
    comparing = _comparing_bytes(work)
    return _RUNTIME_BYTES + max(quantizing, comparing)


def device_memory_bytes(work: Workload, available_bytes: int) -> int:
    """Returns the larger of the same two peaks on a GPU with so much memory, which quantizing makes use of."""
    comparing = _comparing_bytes(work)
    quantizing = _rounding_bytes(work) + _calibrating_bytes(work, available_bytes)
    return _CUDA_RUNTIME_BYTES + max(quantizing, comparing)


def _kept_bytes(work: Workload) -> int:
    """Hidden states of all samples, before and after the layer at hand."""
    return 2 * work.num_samples * work.length * work.hidden_size * _ACTIVATION_BYTES


def _working_bytes(work: Workload) -> int:
    """About eight tensors of the hidden size and four of the intermediate size, and scores of the attention."""
    widths = 8 * work.hidden_size + 4 * work.intermediate_size + 2 * work.length
    return work.length * widths * _ACTIVATION_BYTES


def _keeps_on_device(work: Workload, available_bytes: int) -> bool:
    return _kept_bytes(work) + _working_bytes(work) <= available_bytes * _USABLE_FRACTION


def _calibrating_bytes(work: Workload, available_bytes: int) -> int:
    """As many samples at once, and as many kept on the GPU, as the engine chooses."""
    if not work.num_samples:
        return 0
    kept = _kept_bytes(work) if _keeps_on_device(work, available_bytes) else 0
    room = int(available_bytes * _USABLE_FRACTION) - kept
    batch_size = max(1, min(_MAX_BATCH_SIZE, work.num_samples, room // max(1, _working_bytes(work))))
    return kept + batch_size * _working_bytes(work)


def _comparing_bytes(work: Workload) -> int:
    """Both models, the artifact's as stored and as computed with; and of a window the source's output of every decoder
    layer, and logits of 128 positions a few times.
    """
    models = 2 * work.weights_bytes + work.artifact_bytes
    outputs = work.num_decoder_layers * work.length * work.hidden_size * _ACTIVATION_BYTES
    return models + outputs + 6 * 128 * work.vocabulary_size * _FLOAT_BYTES + _working_bytes(work)


def _rounding_bytes(work: Workload) -> int:
    """Of the largest decoder layer: float32 Hessians; of its largest matrix: the inverse, and copies to be rounded."""
    hessians: dict[str, int] = {}
    largest = 0
    for name, treatment in work.quantized.items():
        rows, columns = work.layers[name]
        by_hessian = treatment.algorithm is Algorithm.GPTQ or treatment.scheme is Scheme.ADAPTIVE
        copies = 4 * rows * columns * _FLOAT_BYTES
        if by_hessian:
            match = _DECODER_LAYER.match(name)
            layer = match[0] if match else name
            hessians[layer] = hessians.get(layer, 0) + columns * columns * _FLOAT_BYTES
            copies += 3 * columns * columns * _FLOAT_BYTES
        largest = max(largest, copies)
    return max(hessians.values(), default=0) + largest
