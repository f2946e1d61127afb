"""Plain values out of `google.protobuf.Struct`."""

from __future__ import annotations

import math
import sys
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from bitmill_common.errors import FieldViolation, InvalidArgumentError

# Of floating-point numbers, the larger ones are no longer apart by one; as integers they have up to 309 digits.
LARGEST_EXACT_INTEGER = 2**53

MAX_DEPTH = 24
"""Objects and lists inside one another. A Struct makes three messages of each, and protobuf reads 100 deep."""


def struct_values(message: Struct, path: str) -> dict[str, Any]:
    """The values of a Struct; whole numbers are int, as in JSON, where a Struct has only floating-point ones.

    Raises `InvalidArgumentError` naming a number that JSON does not have, or what is more than `MAX_DEPTH` deep, which
    could not be sent back in every answer; `path` is that of the Struct.
    """
    return _fields(message, path, MAX_DEPTH)


def _fields(message: Struct, path: str, depth: int) -> dict[str, Any]:
    return {name: _plain(value, f"{path}.{name}", depth - 1) for name, value in message.fields.items()}


def _plain(value: Value, path: str, depth: int) -> Any:
    kind = value.WhichOneof("kind")
    if kind in ("struct_value", "list_value") and depth < 1:
        text = f"must have at most {MAX_DEPTH} objects and lists inside one another"
        raise InvalidArgumentError([FieldViolation(path, text, "TOO_DEEP")])
    match kind:
        case "struct_value":
            return _fields(value.struct_value, path, depth)
        case "list_value":
            return [_plain(item, f"{path}[{index}]", depth - 1) for index, item in enumerate(value.list_value.values)]
        case "number_value":
            return _number(value.number_value, path)
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None


def _number(number: float, path: str) -> int | float:
    if not math.isfinite(number):
        raise InvalidArgumentError([FieldViolation(path, f"must be finite, is {number}", "OUT_OF_RANGE")])
    return int(number) if number.is_integer() and abs(number) <= LARGEST_EXACT_INTEGER else number


def require_struct(values: object, name: str, depth: int = MAX_DEPTH) -> None:
    """Raises `ValueError`, beginning with the name, for JSON values that no Struct holds, or none that can be sent."""
    match values:
        case dict() | list() if depth < 1:
            raise ValueError(f"{name} has more than {MAX_DEPTH} objects and lists inside one another")
        case dict():
            for key, value in values.items():
                require_struct(value, f"{name}.{key}", depth - 1)
        case list():
            for index, value in enumerate(values):
                require_struct(value, f"{name}[{index}]", depth - 1)
        case float() | int() if not -sys.float_info.max <= values <= sys.float_info.max:
            raise ValueError(f"{name} is larger than the numbers of a Struct, or none")
