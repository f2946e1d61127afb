"""What a job would make and take, from a checkpoint's configuration and the headers of its weights alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bitmill_common.artifact import DeviceSupport
from bitmill_common.checkpoint import Checkpoint
from bitmill_common.recipes import AdaptiveSearch, Calibration, Recipe, Scheme
from bitmill_quantizer.plans.engine_memory import Workload, device_memory_bytes, host_memory_bytes
from bitmill_quantizer.plans.layer_sizes import (
    companion_bytes,
    kind_bytes,
    rest_bytes,
    treated_bytes,
    weights_bytes_in_16_bits,
)
from bitmill_quantizer.plans.layers import has_experts
from bitmill_quantizer.plans.treatments import LayerTreatments, Shapes, group_kinds
from bitmill_quantizer.recipes.schemes import default_treatment, devices_for, needs_calibration, treatments_of

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
    checkpoint: Checkpoint,
    layers: Shapes,
    treated: LayerTreatments,
    recipe: Recipe,
    calibration: Calibration,
    available_device_bytes: int = 0,
) -> Estimate:
    """Estimates sizes from shapes. `available_device_bytes`: the GPU's memory, 0 where engines work on the CPU."""
    quantized = treated.quantized
    artifact = rest_bytes(checkpoint, layers) + treated_bytes(layers, treated.treatments) + companion_bytes(checkpoint)
    work = Workload(
        layers=layers,
        quantized=quantized,
        weights_bytes=weights_bytes_in_16_bits(checkpoint.tensors.values()),
        artifact_bytes=artifact,
        hidden_size=config_size(checkpoint, "hidden_size") or 0,
        intermediate_size=config_size(checkpoint, "intermediate_size") or 0,
        vocabulary_size=config_size(checkpoint, "vocab_size") or 0,
        num_decoder_layers=config_size(checkpoint, "num_hidden_layers") or 0,
        num_samples=calibration.num_samples if needs_calibration(recipe) else 0,
        length=calibration.max_sequence_length,
    )
    on_device = device_memory_bytes(work, available_device_bytes) if available_device_bytes else 0
    return Estimate(
        num_quantized_parameters=sum(layers[name][0] * layers[name][1] for name in quantized),
        num_quantized_modules=len(quantized),
        artifact_size_bytes=min(artifact, _MAX_ESTIMATE_BYTES),
        host_memory_bytes=min(host_memory_bytes(work, available_device_bytes), _MAX_ESTIMATE_BYTES),
        device_memory_bytes=min(on_device, _MAX_ESTIMATE_BYTES),
    )


def scheme_sizes(checkpoint: Checkpoint, layers: Shapes) -> tuple[SchemeSize, ...]:
    """Returns what each scheme would make of a checkpoint; ADAPTIVE, whose size is the caller's budget, is left out."""
    kinds = group_kinds(layers)
    rest = rest_bytes(checkpoint, layers) + companion_bytes(checkpoint)
    sizes = []
    for scheme in Scheme:
        if scheme is not Scheme.ADAPTIVE:
            treatment = default_treatment(scheme)
            size = rest + sum(count * kind_bytes(kind, treatment) for kind, count in kinds.items())
            experts = scheme is not Scheme.UNQUANTIZED and any(kind.are_experts for kind in kinds)
            devices = devices_for([scheme], quantized_experts=experts)
            sizes.append(SchemeSize(scheme, min(size, _MAX_ESTIMATE_BYTES), devices))
    return tuple(sizes)


def least_adaptive_bytes(
    checkpoint: Checkpoint, layers: Shapes, treated: LayerTreatments, search: AdaptiveSearch
) -> int:
    """Returns the least bytes of weights that ADAPTIVE can choose: the smallest candidate for each of its layers."""
    chosen = {name for name, treatment in treated.treatments.items() if treatment.scheme is Scheme.ADAPTIVE}
    fixed = {name: treatment for name, treatment in treated.treatments.items() if name not in chosen}
    kinds = group_kinds({name: shape for name, shape in layers.items() if name in chosen})
    least = sum(
        count * min(kind_bytes(kind, candidate) for candidate in search.candidates) for kind, count in kinds.items()
    )
    return rest_bytes(checkpoint, layers) + treated_bytes({name: layers[name] for name in fixed}, fixed) + least


def served_on(checkpoint: Checkpoint, recipe: Recipe, treated: LayerTreatments) -> tuple[DeviceSupport, ...]:
    """Returns the devices that can serve whatever a recipe makes, and whatever ADAPTIVE chooses."""
    schemes = [treatment.scheme for treatment in treatments_of(recipe)]
    experts = has_experts(treated.quantized)
    return devices_for(schemes, recipe.kv_cache, head_size(checkpoint), quantized_experts=experts)


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
