"""Bytes that layers take in an artifact, by what is done to them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from bitmill_common.checkpoint import Checkpoint, TensorInfo
from bitmill_common.recipes import Scheme, Treatment
from bitmill_common.safetensors import DTYPE_BITS
from bitmill_quantizer.plans.treatments import AS_IT_IS, GroupKind, Shapes, treat_kind
from bitmill_quantizer.recipes.schemes import TRAITS

_SCALE_BYTES = 2
_FLOAT_BYTES = 4
_WEIGHT_SHAPE_BYTES = 16
_FP8_BLOCK = 128
_NVFP4_GROUP = 16
_MXFP4_GROUP = 32
# Everything that is not quantized is stored in 16 bits.
_WIDE_FLOATS = ("F32", "F64")
_PLAIN_BITS = 16


def layer_bytes(treatment: Treatment, shape: tuple[int, ...]) -> int:
    """Returns what a layer of this (output, input) shape takes: weights, scales, and zero points where there are any.

    The layouts are those of compressed-tensors 0.19: scales in 16 bits, one for each group, channel, block or tensor;
    those of the 4-bit floats in 8 bits.
    """
    rows, columns = shape
    weights = rows * columns * TRAITS[treatment.scheme].weight_bits // 8
    match treatment.scheme:
        case Scheme.W4A16 | Scheme.W8A16:
            groups = rows * (1 if treatment.group_size < 1 else -(-columns // treatment.group_size))
            zero_points = 0 if treatment.symmetric else groups * TRAITS[treatment.scheme].weight_bits // 8
            return weights + groups * _SCALE_BYTES + zero_points + _WEIGHT_SHAPE_BYTES
        case Scheme.W8A8_INT8 | Scheme.FP8_DYNAMIC:
            return weights + rows * _SCALE_BYTES
        case Scheme.FP8_STATIC:
            return weights + 2 * _SCALE_BYTES
        case Scheme.FP8_BLOCK:
            return weights + -(-rows // _FP8_BLOCK) * -(-columns // _FP8_BLOCK) * _SCALE_BYTES
        case Scheme.NVFP4A16:
            return weights + rows * -(-columns // _NVFP4_GROUP) + _FLOAT_BYTES
        case Scheme.MXFP4A16:
            return weights + rows * -(-columns // _MXFP4_GROUP)
        case Scheme.UNQUANTIZED | Scheme.ADAPTIVE:
            return weights


def kind_bytes(kind: GroupKind, treatment: Treatment) -> int:
    """Returns what a group of a kind takes, treated so where kernels take it and else as it is."""
    shapes = Counter(kind.shapes)
    return sum(count * layer_bytes(treat_kind(kind, treatment), shape) for shape, count in shapes.items())


def treated_bytes(layers: Shapes, treatments: Mapping[str, Treatment]) -> int:
    """Returns what all layers take together."""
    # By identity: a mixture has tens of thousands of layers and few treatments, which are slow to hash.
    kinds = Counter((id(treatments[name]), shape) for name, shape in layers.items())
    by_id = {id(treatment): treatment for treatment in treatments.values()}
    return sum(count * layer_bytes(by_id[key], shape) for (key, shape), count in kinds.items())


def weights_bytes_in_16_bits(tensors: Iterable[TensorInfo]) -> int:
    """Returns what tensors take in an artifact that leaves them as they are."""
    kinds = Counter(dict.fromkeys(DTYPE_BITS, 0))
    for tensor in tensors:
        kinds[tensor.dtype] += tensor.num_elements
    return (
        sum(count * (_PLAIN_BITS if dtype in _WIDE_FLOATS else DTYPE_BITS[dtype]) for dtype, count in kinds.items())
        // 8
    )


def rest_bytes(checkpoint: Checkpoint, layers: Shapes) -> int:
    """Returns what all weights take that belong to none of the layers: embeddings, norms, the output head."""
    whole = weights_bytes_in_16_bits(checkpoint.tensors.values())
    return max(0, whole - treated_bytes(layers, dict.fromkeys(layers, AS_IT_IS)))


def companion_bytes(checkpoint: Checkpoint) -> int:
    """Returns what the files beside the weights take."""
    weight_files = {tensor.file for tensor in checkpoint.tensors.values()}
    return sum(file.size_bytes for file in checkpoint.files if file.path not in weight_files)
