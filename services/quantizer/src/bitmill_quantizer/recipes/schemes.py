"""What is fixed for each scheme: bits, group sizes, algorithms, and the devices whose kernels vLLM has for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.recipes import (
    FIXED_GROUP_SIZE,
    PER_CHANNEL,
    Algorithm,
    KvCacheScheme,
    Recipe,
    Scheme,
    Treatment,
)

GROUP_SIZES = (32, 64, 128)
"""The groups that vLLM's kernels for packed integers take, besides PER_CHANNEL."""

_GROUPED = (*GROUP_SIZES, PER_CHANNEL)
_INTEGER_ALGORITHMS = (Algorithm.GPTQ, Algorithm.RTN)
_NEAREST = (Algorithm.RTN,)


@dataclass(frozen=True)
class SchemeTraits:
    """`algorithms`: those that round to the scheme's grid, its default first. No `group_sizes`: the scales are fixed.

    `needs_calibration`: whatever the algorithm. `size_multiples`: a layer whose (output, input) sizes are no multiples
    of them is skipped, since no kernel takes it. `min_compute_capability`: the least of CUDA, as major * 10 + minor.
    """

    weight_bits: int
    algorithms: tuple[Algorithm, ...]
    size_multiples: tuple[int, int]
    on_cpu: bool
    min_compute_capability: int
    group_sizes: tuple[int, ...] = ()
    default_group_size: int = FIXED_GROUP_SIZE
    may_be_asymmetric: bool = False
    needs_calibration: bool = False


# Kernels as vLLM 0.32 has them. CUDA: `get_min_capability` of the classes in model_executor/layers/quantization/
# compressed_tensors/schemes: CompressedTensorsWNA16 75, W8A8Int8 75, W4A4Fp4 75, W4A4Mxfp4 80; FP8 below 89 is served
# by W8A16Fp8, 75, which leaves the activations as they are. vLLM itself begins at 75. CPU: what `_POSSIBLE_…_KERNELS`
# in model_executor/kernels/linear offers there: CPUWNA16LinearKernel (4 bits only, sizes in multiples of 32),
# CPUInt8ScaledMMLinearKernel (any size) and ChannelWiseTorchFP8ScaledMMLinearKernel; blocks and tensors of FP8 need a
# processor with AMX, and there is none for the 4-bit floats.
# Sizes are those of the engines' own plan, kit/plan.py, which has their sources.
TRAITS: dict[Scheme, SchemeTraits] = {
    Scheme.W4A16: SchemeTraits(
        weight_bits=4,
        algorithms=(Algorithm.GPTQ, Algorithm.AWQ, Algorithm.RTN),
        size_multiples=(32, 32),
        on_cpu=True,
        min_compute_capability=75,
        group_sizes=_GROUPED,
        default_group_size=128,
        may_be_asymmetric=True,
    ),
    Scheme.W8A16: SchemeTraits(
        weight_bits=8,
        algorithms=_INTEGER_ALGORITHMS,
        size_multiples=(32, 32),
        on_cpu=False,
        min_compute_capability=75,
        group_sizes=_GROUPED,
        default_group_size=PER_CHANNEL,
    ),
    Scheme.W8A8_INT8: SchemeTraits(8, _INTEGER_ALGORITHMS, (16, 16), on_cpu=True, min_compute_capability=75),
    Scheme.FP8_DYNAMIC: SchemeTraits(8, _NEAREST, (16, 16), on_cpu=True, min_compute_capability=75),
    Scheme.FP8_STATIC: SchemeTraits(
        8, _NEAREST, (16, 16), on_cpu=False, min_compute_capability=75, needs_calibration=True
    ),
    Scheme.FP8_BLOCK: SchemeTraits(8, _NEAREST, (16, 128), on_cpu=False, min_compute_capability=75),
    Scheme.NVFP4A16: SchemeTraits(4, _NEAREST, (16, 16), on_cpu=False, min_compute_capability=75),
    Scheme.MXFP4A16: SchemeTraits(4, _NEAREST, (16, 32), on_cpu=False, min_compute_capability=80),
    Scheme.UNQUANTIZED: SchemeTraits(16, (Algorithm.NONE,), (1, 1), on_cpu=True, min_compute_capability=75),
    Scheme.ADAPTIVE: SchemeTraits(
        16, (Algorithm.NONE,), (1, 1), on_cpu=True, min_compute_capability=75, needs_calibration=True
    ),
}

# FlashInfer, 80, writes and reads an FP8 cache; Triton's attention, 89, does; FlashAttention 2 does not. On the CPU
# `_get_attn_isa` of v1/attention/backends/cpu_attn.py asks for heads in multiples of 32.
_FP8_CACHE_MIN_COMPUTE_CAPABILITY = 80
_FP8_CACHE_CPU_HEAD_MULTIPLE = 32


def default_treatment(scheme: Scheme) -> Treatment:
    """Returns what is done to a layer by a scheme with its defaults."""
    traits = TRAITS[scheme]
    return Treatment(scheme, traits.algorithms[0], traits.default_group_size)


def treatments_of(recipe: Recipe) -> tuple[Treatment, ...]:
    """Returns all that a recipe may do to a layer; in place of ADAPTIVE the candidates."""
    own = recipe.adaptive.candidates if recipe.adaptive else (recipe.treatment,)
    return (*own, *(rule.treatment for rule in recipe.rules))


def needs_calibration(recipe: Recipe) -> bool:
    """Whether calibration data is read."""
    return (
        recipe.kv_cache is not None
        or recipe.smoothing_strength > 0
        or recipe.adaptive is not None
        or any(
            TRAITS[each.scheme].needs_calibration or each.algorithm in (Algorithm.GPTQ, Algorithm.AWQ)
            for each in treatments_of(recipe)
        )
    )


def devices_for(
    schemes: Iterable[Scheme],
    kv_cache: KvCacheScheme | None = None,
    head_size: int | None = None,
    *,
    quantized_experts: bool = False,
) -> tuple[DeviceSupport, ...]:
    """Returns the devices that can serve a model whose layers have these schemes: those that serve each of them.

    `head_size` is that of the attention; None where it is not known. `quantized_experts`: whether the experts of a
    mixture are among the quantized layers; vLLM's kernels for them (`fused_moe/experts/cpu_moe.py`) need AMX, which few
    processors have.
    """
    used = [TRAITS[scheme] for scheme in {*schemes, Scheme.UNQUANTIZED}]
    on_cpu = all(traits.on_cpu for traits in used) and not quantized_experts
    capability = max(traits.min_compute_capability for traits in used)
    if kv_cache is KvCacheScheme.FP8:
        on_cpu = on_cpu and head_size is not None and head_size % _FP8_CACHE_CPU_HEAD_MULTIPLE == 0
        capability = max(capability, _FP8_CACHE_MIN_COMPUTE_CAPABILITY)
    cuda = DeviceSupport(Device.CUDA, capability)
    return (DeviceSupport(Device.CPU), cuda) if on_cpu else (cuda,)
