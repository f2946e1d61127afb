"""Recipes and quantities as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, timedelta

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from bitmill.artifact.v1.recipe_pb2 import (
    ActivationOrder,
    AdaptiveSearch,
    Algorithm,
    KvCacheScheme,
    Packing,
    Recipe,
    Scheme,
)
from bitmill.cli import output

_SCHEMES = {
    Scheme.SCHEME_W4A16: "4-bit integer weights, 16-bit activations",
    Scheme.SCHEME_W8A16: "8-bit integer weights, 16-bit activations",
    Scheme.SCHEME_W8A8_INT8: "8-bit integer weights, activations rounded to int8 per token as they arrive",
    Scheme.SCHEME_FP8_DYNAMIC: "FP8 weights, activations rounded to FP8 per token as they arrive",
    Scheme.SCHEME_FP8_STATIC: "FP8 weights, activations rounded to FP8 by calibrated scales",
    Scheme.SCHEME_FP8_BLOCK: "FP8 weights in blocks of 128 × 128, activations rounded to FP8 in groups of 128",
    Scheme.SCHEME_NVFP4A16: "NVFP4 weights (4-bit floats, a scale per 16), 16-bit activations",
    Scheme.SCHEME_MXFP4A16: "MXFP4 weights (4-bit floats, a power-of-two scale per 32), 16-bit activations",
    Scheme.SCHEME_UNQUANTIZED: "16-bit weights as the source has them",
    Scheme.SCHEME_ADAPTIVE: "each layer's scheme chosen from measured sensitivity under a budget",
}
_ALGORITHMS = {
    Algorithm.ALGORITHM_GPTQ: "GPTQ",
    Algorithm.ALGORITHM_AWQ: "AWQ",
    Algorithm.ALGORITHM_RTN: "round to nearest",
}
_ORDERS = {
    ActivationOrder.ACTIVATION_ORDER_NONE: "channels in the order in which they are stored",
    ActivationOrder.ACTIVATION_ORDER_STATIC: "most active channels first, groups as stored",
    ActivationOrder.ACTIVATION_ORDER_GROUP: "most active channels first, groups in that order",
}
_PACKINGS = {
    Packing.PACKING_CONCATENATE: "documents laid end to end",
    Packing.PACKING_TRUNCATE: "each document a sample, long ones cut off",
}


def scheme_name(scheme: int) -> str:
    """A scheme without its prefix, for example "W4A16"."""
    return output.word(Scheme, scheme).upper()


def grid(scheme: int, group_size: int) -> str:
    """A scheme with its group size where it has one, for example "W4A16 g64"."""
    suffix = " per channel" if group_size == -1 else f" g{group_size}" if group_size else ""
    return scheme_name(scheme) + suffix


def headline(recipe: Recipe) -> str:
    """The recipe in one line."""
    return _listed(scheme_name(recipe.scheme), _SCHEMES.get(recipe.scheme, ""), scales(recipe.group_size))


def scales(group_size: int) -> str:
    """What shares a scale; empty where the scheme says it."""
    if group_size == -1:
        return "one scale per output channel"
    return f"one scale per {group_size} input channels" if group_size else ""


def recipe_facts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The recipe line by line; a value is empty for what the recipe does not have."""
    symmetry = ("symmetric" if recipe.symmetric else "asymmetric") + " grid" if recipe.HasField("symmetric") else ""
    yield "scheme", scheme_name(recipe.scheme)
    yield "weights", _listed(_SCHEMES.get(recipe.scheme, ""), scales(recipe.group_size), symmetry)
    yield "rounded by", _ALGORITHMS.get(recipe.algorithm, "")
    if recipe.algorithm == Algorithm.ALGORITHM_GPTQ:
        yield "order", _ORDERS.get(recipe.activation_order, "")
        yield "damping", f"{recipe.dampening_frac:g} of the Hessian's mean diagonal" if recipe.dampening_frac else ""
    yield "SmoothQuant", f"strength {recipe.smoothing_strength:g}" if recipe.smoothing_strength else ""
    yield "left alone", ", ".join(recipe.ignore)
    for number, rule in enumerate(recipe.rules, start=1):
        algorithm = _ALGORITHMS.get(rule.algorithm, "")
        treatment = _listed(grid(rule.scheme, rule.group_size), f"rounded by {algorithm}" if algorithm else "")
        yield f"rule {number}", f"{rule.pattern} → {treatment}"
    yield "KV cache", "FP8, calibrated scales" if recipe.kv_cache == KvCacheScheme.KV_CACHE_SCHEME_FP8 else ""
    if recipe.HasField("adaptive"):
        yield from _adaptive_facts(recipe.adaptive)
    yield "seed", str(recipe.seed)


def _adaptive_facts(search: AdaptiveSearch) -> Iterator[tuple[str, str]]:
    yield "chosen from", ", ".join(grid(each.scheme, each.group_size) for each in search.candidates)
    if search.WhichOneof("budget") == "max_size_bytes":
        yield "budget", f"least loss within {size(search.max_size_bytes)}"
    else:
        yield "budget", f"least size within {search.max_perplexity_ratio:g} times the source's perplexity"
    yield "measured on", f"{search.num_samples} samples" if search.num_samples else ""


def options(struct: Struct) -> Iterator[str]:
    """Names and values of a mapping, by name; a whole number is written as one, as a Struct has floats alone."""
    for name, value in sorted(json_format.MessageToDict(struct).items()):
        whole = isinstance(value, float) and value.is_integer()
        yield f"{name} {json.dumps(int(value) if whole else value)}"


def packing(value: int) -> str:
    """How samples are made of documents."""
    return _PACKINGS.get(value, "")  # type: ignore[call-overload,no-any-return]  # an enum's number


def size(number: int) -> str:
    """A number of bytes in decimal units."""
    return output.size(number) or "0 bytes"


def moment(timestamp: Timestamp) -> str:
    """A time in UTC; empty for an unset one."""
    return timestamp.ToDatetime(tzinfo=UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if timestamp.ByteSize() else ""


def seconds(duration: Duration) -> float:
    """A duration as a number."""
    return duration.ToTimedelta().total_seconds()


def duration(value: float) -> str:
    """Seconds for people: "4.2 s", "3 min 20 s", "2 h 5 min"."""
    if value < 60:
        return f"{value:.3g} s"
    whole = int(timedelta(seconds=value).total_seconds())
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """A measured value with four significant digits, for example "0.0421" or "3.1e-07"."""
    return f"{value:.4g}"


def _listed(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
