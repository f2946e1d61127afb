"""Plain values out of `google.protobuf.Struct`."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from bitmill_common.errors import FieldViolation, InvalidArgumentError

# Of floating-point numbers, the larger ones are no longer apart by one; as integers they have up to 309 digits.
LARGEST_EXACT_INTEGER = 2**53


def struct_values(message: Struct, path: str) -> dict[str, Any]:
    """The values of a Struct; whole numbers are int, as in JSON, where a Struct has only floating-point ones.

    Raises `InvalidArgumentError` naming a number that JSON does not have; `path` is that of the Struct.
    """
    return {name: _plain(value, f"{path}.{name}") for name, value in message.fields.items()}


def _plain(value: Value, path: str) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return struct_values(value.struct_value, path)
        case "list_value":
            return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value.list_value.values)]
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
