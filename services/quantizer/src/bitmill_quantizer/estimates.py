"""What a job would make and take, from a checkpoint's configuration and the headers of its weights alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bitmill_common.artifact import DeviceSupport
from bitmill_common.checkpoint import Checkpoint
from bitmill_common.recipes import AdaptiveSearch, Algorithm, Calibration, Recipe, Scheme, Treatment
from bitmill_quantizer.layer_sizes import artifact_bytes, layer_bytes, weight_files_bytes, weights_bytes_in_16_bits
from bitmill_quantizer.schemes import default_treatment, devices_for, needs_calibration, treatments_of
from bitmill_quantizer.treatments import LayerTreatments, Shapes, treat_alike

_ACTIVATION_BYTES = 2
_HESSIAN_BYTES = 4
_LOGIT_BYTES = 4
# Python, torch and transformers themselves, before any weight is loaded.
_RUNTIME_BYTES = 1 << 30
# A tensor without elements may have any width. More than any server has, and two of them fit a uint64.
_MAX_ESTIMATE_BYTES = 1 << 62
_SIZE_LIMIT = 1 << 31


@dataclass(frozen=True)
class Estimate:
    """What a job would make and take. Bytes; a mature guess, not a promise. `device_memory_bytes`: 0 on the CPU."""

    num_quantized_parameters: int
    num_quantized_modules: int
    artifact_size_bytes: int
    host_memory_bytes: int
    device_memory_bytes: int = 0


@dataclass(frozen=True)
class SchemeSize:
    """Expected size of the artifact by a scheme with its defaults, and the devices that could serve it."""

    scheme: Scheme
    artifact_size_bytes: int
    devices: tuple[DeviceSupport, ...]


def estimate(
    checkpoint: Checkpoint, layers: Shapes, treated: LayerTreatments, recipe: Recipe, calibration: Calibration
) -> Estimate:
    """Estimates sizes from shapes.

    Memory, the larger of two peaks: quantizing holds the model, the float32 Hessians of one decoder layer and two
    copies of the calibration activations; evaluating holds both models and the logits of one window.
    """
    quantized = treated.quantized
    weights = weights_bytes_in_16_bits(checkpoint.tensors.values())
    hidden = config_size(checkpoint, "hidden_size") or 0
    vocabulary = config_size(checkpoint, "vocab_size") or 0
    num_tokens = calibration.num_samples * calibration.max_sequence_length if needs_calibration(recipe) else 0
    hessians = _hessian_bytes_of_largest_layer(layers, quantized)
    quantizing = weights + hessians + 2 * num_tokens * hidden * _ACTIVATION_BYTES
    evaluating = 2 * weights + 4 * calibration.max_sequence_length * vocabulary * _LOGIT_BYTES
    return Estimate(
        num_quantized_parameters=sum(layers[name][0] * layers[name][1] for name in quantized),
        num_quantized_modules=len(quantized),
        artifact_size_bytes=min(artifact_bytes(checkpoint, layers, treated.treatments), _MAX_ESTIMATE_BYTES),
        host_memory_bytes=min(_RUNTIME_BYTES + max(quantizing, evaluating), _MAX_ESTIMATE_BYTES),
    )


def scheme_sizes(checkpoint: Checkpoint, layers: Shapes) -> tuple[SchemeSize, ...]:
    """Returns what each scheme would make of a checkpoint; ADAPTIVE, whose size is the caller's budget, is left out."""
    sizes = []
    for scheme in Scheme:
        if scheme is not Scheme.ADAPTIVE:
            treatments = treat_alike(layers, default_treatment(scheme))
            size = min(artifact_bytes(checkpoint, layers, treatments), _MAX_ESTIMATE_BYTES)
            sizes.append(SchemeSize(scheme, size, devices_for([scheme])))
    return tuple(sizes)


def least_adaptive_bytes(
    checkpoint: Checkpoint, layers: Shapes, treated: LayerTreatments, search: AdaptiveSearch
) -> int:
    """Returns the least bytes of weights that ADAPTIVE can choose: the smallest candidate for each of its layers."""
    options = [treat_alike(layers, candidate) for candidate in search.candidates]
    smallest = {
        name: min((option[name] for option in options), key=lambda option: layer_bytes(option, layers[name]))
        if treatment.scheme is Scheme.ADAPTIVE
        else treatment
        for name, treatment in treated.treatments.items()
    }
    return weight_files_bytes(checkpoint, layers, smallest)


def served_on(checkpoint: Checkpoint, recipe: Recipe) -> tuple[DeviceSupport, ...]:
    """Returns the devices that can serve whatever a recipe makes, and whatever ADAPTIVE chooses."""
    schemes = [treatment.scheme for treatment in treatments_of(recipe)]
    return devices_for(schemes, recipe.kv_cache, head_size(checkpoint))


def head_size(checkpoint: Checkpoint) -> int | None:
    """Returns the width of an attention head, where the config tells."""
    if size := config_size(checkpoint, "head_dim"):
        return size
    hidden, heads = config_size(checkpoint, "hidden_size"), config_size(checkpoint, "num_attention_heads")
    return hidden // heads if hidden and heads else None


def config_size(checkpoint: Checkpoint, field: str) -> int | None:
    """Returns a size of the config; None for what is none."""
    size = checkpoint.config.get(field)
    return size if type(size) is int and 0 < size < _SIZE_LIMIT else None


def _hessian_bytes_of_largest_layer(layers: Shapes, quantized: Mapping[str, Treatment]) -> int:
    by_layer: dict[str, int] = {}
    for name, treatment in quantized.items():
        if treatment.algorithm is Algorithm.GPTQ or treatment.scheme is Scheme.ADAPTIVE:
            match = re.match(r".*\blayers\.\d+\.", name)
            layer = match[0] if match else name
            by_layer[layer] = by_layer.get(layer, 0) + layers[name][1] ** 2 * _HESSIAN_BYTES
    return max(by_layer.values(), default=0)
