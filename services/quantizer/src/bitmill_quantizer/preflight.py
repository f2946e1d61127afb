"""What can be told about a job from the checkpoint's configuration and safetensors headers alone. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.errors import BitmillError, FailedPreconditionError, FieldViolation, InvalidArgumentError
from bitmill_common.recipes import Calibration, Recipe
from bitmill_quantizer.layers import ARCHITECTURES, OUTPUT_HEAD, fused_matrix, linear_layers, matches, target_layers
from bitmill_quantizer.schemes import GROUP_SIZES, PER_CHANNEL, TRAITS
from bitmill_quantizer.specs import MIN_SEQUENCE_LENGTH

_BYTES_OF_DTYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}

_SCALE_BYTES = 2
_HESSIAN_BYTES = 4
_LOGIT_BYTES = 4
_WEIGHT_SHAPE_BYTES = 16
# Python, torch and transformers themselves, before any weight is loaded.
_RUNTIME_BYTES = 1 << 30
# A tensor without elements may have any width. More than any server has, and two of them fit a uint64.
_MAX_ESTIMATE_BYTES = 1 << 62
_SIZE_LIMIT = 1 << 31


@dataclass(frozen=True)
class Problem:
    """One thing that stands in a job's way. `field` is empty when the checkpoint or this server is at fault.

    `kind` and `metadata` are those of the error that it would be alone.
    """

    field: str
    reason: str
    description: str
    kind: type[BitmillError] = FailedPreconditionError
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """What a job would make and take. Bytes; a mature guess, not a promise."""

    num_quantized_parameters: int
    num_quantized_modules: int
    artifact_size_bytes: int
    host_memory_bytes: int


def raise_for(problems: Sequence[Problem]) -> None:
    """Raises the one error that stands for all the problems; returns when there are none.

    Wrong fields go first, as `InvalidArgumentError`; what remains is said once they are right.
    """
    violations = [FieldViolation(p.field, p.description, p.reason) for p in problems if p.kind is InvalidArgumentError]
    if violations:
        raise InvalidArgumentError(violations)
    if problems:
        first = problems[0]
        raise first.kind(first.reason, "; ".join(p.description for p in problems), first.metadata)


def checkpoint_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yields what is wrong with a checkpoint whatever the recipe."""
    architecture = checkpoint.architecture
    if architecture not in ARCHITECTURES:
        yield Problem(
            "",
            "UNSUPPORTED_ARCHITECTURE",
            f"the architecture {architecture or '(none)'} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}",
            metadata={"architecture": architecture},
        )
    if checkpoint.quantization is not None:
        method = str(checkpoint.quantization.get("quant_method", "unknown"))
        yield Problem(
            "",
            "ALREADY_QUANTIZED",
            f"the checkpoint is quantized already (quant_method {method}); start from the original",
            metadata={"quant_method": method},
        )
    for field in ("hidden_size", "vocab_size"):
        if checkpoint.config.get(field) is not None and _config_size(checkpoint, field) is None:
            yield Problem("", "CONFIG_INVALID", f"the checkpoint's config.json has a {field} that is no size")
    if not linear_layers(checkpoint):
        yield Problem("", "NO_LINEAR_LAYERS", "the checkpoint has no Linear layer to quantize")


def recipe_problems(checkpoint: Checkpoint, recipe: Recipe, calibration: Calibration) -> Iterator[Problem]:
    """Yields every field of a valid spec that does not fit this checkpoint."""
    targets = target_layers(checkpoint, recipe.ignore)
    yield from _ignore_problems(checkpoint, recipe.ignore, targets)
    yield from _group_size_problems(recipe, targets)
    context_length = checkpoint.config.get("max_position_embeddings")
    length = calibration.max_sequence_length
    if isinstance(context_length, int) and MIN_SEQUENCE_LENGTH <= context_length < length:
        yield _field_problem(
            "spec.calibration.max_sequence_length",
            "EXCEEDS_CONTEXT_LENGTH",
            f"{length} is more than the model's context length of {context_length}",
        )


def _field_problem(path: str, reason: str, description: str) -> Problem:
    return Problem(path, reason, description, kind=InvalidArgumentError)


def _ignore_problems(
    checkpoint: Checkpoint, ignore: Sequence[str], targets: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    layers = linear_layers(checkpoint)
    known = [OUTPUT_HEAD, *layers]
    for index, pattern in enumerate(ignore):
        if not any(matches(pattern, name) for name in known):
            yield _field_problem(
                f"spec.recipe.ignore[{index}]",
                "PATTERN_MATCHES_NOTHING",
                f"{pattern} matches no layer; layers are named like {next(iter(layers), OUTPUT_HEAD)}",
            )
    if layers and not targets:
        yield _field_problem("spec.recipe.ignore", "NOTHING_TO_QUANTIZE", "leaves no layer to quantize")
    if split := _first_split_group(layers, targets):
        kept, quantized = split
        yield _field_problem(
            "spec.recipe.ignore",
            "SPLITS_FUSED_LAYERS",
            f"leaves out {kept} and not {quantized}, which vLLM runs as one matrix: leave out both or neither",
        )


def _first_split_group(
    layers: Mapping[str, tuple[int, ...]], targets: Mapping[str, tuple[int, ...]]
) -> tuple[str, str] | None:
    quantized = {fused_matrix(name): name for name in targets}
    for name in layers:
        if name not in targets and (other := quantized.get(fused_matrix(name))):
            return name, other
    return None


def _group_size_problems(recipe: Recipe, targets: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    size = recipe.group_size
    if size == PER_CHANNEL:
        return
    odd = [(name, shape[1]) for name, shape in targets.items() if shape[1] % size]
    if not odd:
        return
    fitting = [g for g in GROUP_SIZES if all(shape[1] % g == 0 for shape in targets.values())]
    name, width = odd[0]
    yield _field_problem(
        "spec.recipe.group_size",
        "GROUP_SIZE_DOES_NOT_DIVIDE",
        f"{size} does not divide the input size {width} of {name} ({len(odd)} such layers); of "
        f"{', '.join(map(str, GROUP_SIZES))} every one is divided by {', '.join(map(str, fitting)) or 'none'}; -1 (one "
        "scale per output channel) always fits",
    )


def estimate(checkpoint: Checkpoint, recipe: Recipe, calibration: Calibration) -> Estimate:
    """Estimates sizes from shapes.

    The artifact: packed weights, a 16-bit scale per group, packed zero points when asymmetric; everything else as it
    is. Memory, the larger of two peaks: quantizing holds the model, the float32 Hessians of one decoder layer and two
    copies of the calibration activations; evaluating holds both models and the logits of one window.
    """
    targets = target_layers(checkpoint, recipe.ignore)
    bits = TRAITS[recipe.scheme].weight_bits
    before = sum(_tensor_bytes(checkpoint, f"{name}.weight") for name in targets)
    after = sum(_quantized_bytes(shape, recipe, bits) for shape in targets.values())
    artifact = checkpoint.size_bytes - before + after
    hidden = _config_size(checkpoint, "hidden_size") or 0
    vocabulary = _config_size(checkpoint, "vocab_size") or 0
    num_tokens = calibration.num_samples * calibration.max_sequence_length
    hessians = _hessian_bytes_of_largest_layer(targets)
    quantizing = checkpoint.size_bytes + hessians + 2 * num_tokens * hidden * _SCALE_BYTES
    evaluating = 2 * checkpoint.size_bytes + 4 * calibration.max_sequence_length * vocabulary * _LOGIT_BYTES
    return Estimate(
        num_quantized_parameters=sum(rows * columns for rows, columns in targets.values()),
        num_quantized_modules=len(targets),
        artifact_size_bytes=min(artifact, _MAX_ESTIMATE_BYTES),
        host_memory_bytes=min(_RUNTIME_BYTES + max(quantizing, evaluating), _MAX_ESTIMATE_BYTES),
    )


def _config_size(checkpoint: Checkpoint, field: str) -> int | None:
    size = checkpoint.config.get(field)
    return size if type(size) is int and 0 < size < _SIZE_LIMIT else None


def _tensor_bytes(checkpoint: Checkpoint, name: str) -> int:
    tensor = checkpoint.tensors[name]
    rows, columns = tensor.shape
    return rows * columns * _BYTES_OF_DTYPE.get(tensor.dtype, 1)


def _quantized_bytes(shape: tuple[int, ...], recipe: Recipe, bits: int) -> int:
    rows, columns = shape
    groups = rows * (1 if recipe.group_size == PER_CHANNEL else columns // recipe.group_size)
    zero_points = 0 if recipe.symmetric else groups * bits // 8
    return rows * columns * bits // 8 + groups * _SCALE_BYTES + zero_points + _WEIGHT_SHAPE_BYTES


def _hessian_bytes_of_largest_layer(targets: Mapping[str, tuple[int, ...]]) -> int:
    by_layer: dict[str, int] = {}
    for name, (_, columns) in targets.items():
        match = re.match(r".*\blayers\.\d+\.", name)
        layer = match[0] if match else name
        by_layer[layer] = by_layer.get(layer, 0) + columns * columns * _HESSIAN_BYTES
    return max(by_layer.values(), default=0)
