"""Plain values out of a Struct."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct

from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from bitmill_common.errors import InvalidArgumentError
from bitmill_common.structs import MAX_DEPTH, require_struct, struct_values


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


def nested(depth: int, *, lists: bool) -> dict[str, object]:
    """So many objects inside one another, or lists in an object."""
    value: object = 1
    for _ in range(depth - 1):
        value = [value] if lists else {"a": value}
    return {"a": value}


@pytest.mark.parametrize("lists", [True, False])
def test_what_is_taken_can_be_sent_in_every_answer(lists: bool) -> None:
    """A reader of protobuf gives up on messages that are 100 deep."""
    values = Struct()
    values.update(nested(MAX_DEPTH, lists=lists))
    require_struct(struct_values(values, "values"), "values")
    spec = quantization_job_pb2.QuantizationSpec(engine_options=values)
    event = quantization_job_pb2.JobEvent(job=quantization_job_pb2.QuantizationJob(spec=spec))
    answer = quantizer_service_pb2.WatchQuantizationJobResponse(event=event)
    assert type(answer).FromString(answer.SerializeToString()) == answer


@pytest.mark.parametrize("lists", [True, False])
def test_what_is_too_deep_is_refused(lists: bool) -> None:
    plain = nested(MAX_DEPTH + 1, lists=lists)
    values = Struct()
    values.update(plain)
    with pytest.raises(InvalidArgumentError, match="24 objects and lists"):
        struct_values(values, "values")
    with pytest.raises(ValueError, match=r"^values.* 24 objects and lists"):
        require_struct(plain, "values")


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 10**400, -(10**400)])
def test_numbers_that_no_struct_can_send_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match=r"^values\.a\[0\]"):
        require_struct({"a": [number]}, "values")
