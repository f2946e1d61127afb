"""Plain values out of a Struct."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct

from bitmill_common.errors import InvalidArgumentError
from bitmill_common.structs import struct_values


@pytest.mark.parametrize(
    ("given", "plain"),
    [(2.0, int), (-(2.0**53), int), (2.5, float), (2.0**54, float), (1e308, float), (-1e308, float)],
)
def test_a_whole_number_is_an_integer_as_far_as_it_is_exact(given: float, plain: type) -> None:
    """What takes the values has integers of 64 bits."""
    values = Struct()
    values["number"] = given
    number = struct_values(values, "values")["number"]
    assert (number, type(number)) == (given, plain)


def test_what_is_no_number_is_named() -> None:
    values = Struct()
    values["list"] = [1, float("nan")]
    with pytest.raises(InvalidArgumentError) as caught:
        struct_values(values, "values")
    assert [violation.field for violation in caught.value.violations] == ["values.list[1]"]
