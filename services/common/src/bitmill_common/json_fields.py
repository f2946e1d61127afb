"""Typed reading of parsed JSON. Every function raises `ValueError`, naming the field, for what it does not accept."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


def take(value: object, key: str, kind: type) -> Any:
    """Returns a field of one type; a boolean is no number."""
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"{key} is missing")
    field = value[key]
    if not isinstance(field, kind) or (isinstance(field, bool) and kind is not bool):
        raise ValueError(f"{key} must be of type {kind.__name__}, is {type(field).__name__}")
    return field


def take_count(value: object, key: str, *, bits: int = 64) -> int:
    """Returns a whole number that an unsigned integer of so many bits holds."""
    count: int = take(value, key, int)
    check(0 <= count < 2**bits, f"{key} must be from 0 to 2**{bits} - 1")
    return count


def take_number(value: object, key: str) -> float:
    """Returns a finite number. Accepts whole numbers too, which other JSON writers make of 1.0."""
    is_whole = isinstance(value, dict) and type(value.get(key)) is int
    number = float(take(value, key, int if is_whole else float))
    check(math.isfinite(number), f"{key} must be finite")
    return number


def take_texts(value: object, key: str) -> tuple[str, ...]:
    """Returns a list of texts."""
    texts = take(value, key, list)
    check(all(isinstance(text, str) for text in texts), f"{key} must hold strings")
    return tuple(texts)


def take_text_map(value: object, key: str) -> dict[str, str]:
    """Returns texts by name."""
    texts = take(value, key, dict)
    check(all(isinstance(text, str) for text in texts.values()), f"{key} must hold strings")
    return {name: str(text) for name, text in texts.items()}


def take_name(value: object, key: str, names: type[E]) -> E:
    """Returns the member of an enum that has the text for its value."""
    return names(take(value, key, str))


def take_rows(value: object, key: str, parse: Callable[[object], T]) -> tuple[T, ...]:
    """Returns a list, each of its values parsed."""
    return tuple(parse(row) for row in take(value, key, list))


def optional(value: Mapping[str, object], key: str, read: Callable[[], T], default: T) -> T:
    """Returns what `read` makes of a field; the default where the field is not there."""
    return read() if key in value else default


def nullable(value: Mapping[str, object], key: str, read: Callable[[], T]) -> T | None:
    """Returns what `read` makes of a field; None where it is null or not there."""
    return None if value.get(key) is None else read()


def check(holds: bool, message: str) -> None:
    """Raises `ValueError` with the message unless it holds."""
    if not holds:
        raise ValueError(message)
