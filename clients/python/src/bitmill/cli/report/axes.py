"""Axes of a plot: where a value lies between 0 and 1, and which values are marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """One axis. `place` takes a value to its part of the axis, from 0 to 1; `ticks` are places and their texts."""

    label: str
    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def linear(label: str, low: float, high: float, unit: float = 1.0, most: int = 6) -> Axis:
    """An axis that grows evenly, with at most `most` marks at round multiples of `unit`."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _round_step((high - low) / unit / most) * unit

    def place(value: float) -> float:
        return (value - low) / (high - low)

    first = math.ceil(low / step - 1e-9)
    marks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(label, place, [(place(mark), f"{mark / unit:.6g}") for mark in marks])


def positions(label: str, count: int) -> Axis:
    """An axis for numbered things, each in the middle of a part of its own."""
    step = max(1, math.ceil(_round_step(count / 10)))
    return Axis(
        label,
        lambda index: (index + 0.5) / count,
        [((index + 0.5) / count, str(index)) for index in range(0, count, step)],
    )


def logarithmic(label: str, values: Iterable[float]) -> Axis:
    """An axis for values that span decades. Zeros, which it cannot have, lie on its lower end, marked 0.

    It has no place for infinities and NaN, and is made without them.
    """
    known = list(filter(math.isfinite, values))
    positive = [value for value in known if value > 0]
    if not positive:
        return Axis(label, lambda _: 0.0, [(0.0, "0")])
    has_zero = len(positive) < len(known)
    low, high = math.log10(min(positive)), math.log10(max(positive))
    pad = max((high - low) * 0.06, 0.08)
    low, high = low - pad - (0.5 if has_zero else 0.0), high + pad

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) if value > 0 else 0.0

    marks = _decades(low + (0.25 if has_zero else 0.0), high)
    ticks = [((exponent - low) / (high - low), text) for exponent, text in marks]
    return Axis(label, place, [(0.0, "0"), *ticks] if has_zero else ticks)


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    """Marks between two decimal logarithms, as such: at powers of ten and, where few of them are, between them."""
    decades = math.floor(high) - math.ceil(low) + 1
    every = max(1, math.ceil(decades / 6))
    parts = (1,) if decades > 2 else (1, 2, 5) if high - low > 0.7 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    exponents = [exponent for exponent in range(math.floor(low), math.ceil(high) + 1) if exponent % every == 0]
    marks = [(math.log10(part) + exponent, _power(part, exponent)) for exponent in exponents for part in parts]
    return [(mark, text) for mark, text in marks if low <= mark <= high]


def _power(part: float, exponent: int) -> str:
    if -3 <= exponent <= 3:
        return f"{part * 10.0**exponent:.6g}"
    ten = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return ten if part == 1 else f"{part:g}·{ten}"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
