"""What is fixed for each scheme: bits, group sizes, and the devices whose kernels vLLM has for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.recipes import Recipe, Scheme

PER_CHANNEL = -1
"""The group size that stands for one scale per output channel."""

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class SchemeTraits:
    """`default_group_size` is None where the scheme has one scale per output channel and takes no group size.

    `cpu_multiple`: on the CPU, input and output sizes of every layer must be multiples of it; None: no CPU kernel.
    `min_compute_capability`: the least of CUDA, as major * 10 + minor.
    """

    weight_bits: int
    default_group_size: int | None
    may_be_asymmetric: bool
    cpu_multiple: int | None
    min_compute_capability: int


# Devices as vLLM 0.32 has them. CUDA: `get_min_capability` of CompressedTensorsWNA16 and of CompressedTensorsW8A8Int8
# in model_executor/layers/quantization/compressed_tensors/schemes. CPU: `can_implement` of CPUWNA16LinearKernel (4 bits
# only, zero points or not, sizes in multiples of 32) and of CPUInt8ScaledMMLinearKernel (any size) in
# model_executor/kernels/linear.
TRAITS: dict[Scheme, SchemeTraits] = {
    Scheme.W4A16: SchemeTraits(4, 128, may_be_asymmetric=True, cpu_multiple=32, min_compute_capability=75),
    Scheme.W8A16: SchemeTraits(8, PER_CHANNEL, may_be_asymmetric=False, cpu_multiple=None, min_compute_capability=75),
    Scheme.W8A8_INT8: SchemeTraits(8, None, may_be_asymmetric=False, cpu_multiple=1, min_compute_capability=75),
}


def devices_for(recipe: Recipe, layer_shapes: Iterable[tuple[int, ...]]) -> tuple[DeviceSupport, ...]:
    """Returns the devices that can serve a model whose quantized layers have these (output, input) shapes."""
    traits = TRAITS[recipe.scheme]
    cuda = DeviceSupport(Device.CUDA, traits.min_compute_capability)
    multiple = traits.cpu_multiple
    if multiple is None or any(size % multiple for shape in layer_shapes for size in shape):
        return (cuda,)
    return (DeviceSupport(Device.CPU), cuda)
