"""Who calls, and which trace a call belongs to."""

from __future__ import annotations

import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill_inference.servicers.convert_options import request_options


class FakeContext:
    """A call with a peer and metadata."""

    def __init__(self, peer: str, *metadata: tuple[str, str | bytes]) -> None:
        self._peer = peer
        self._metadata = metadata

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self._metadata or None


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:10.0.0.7:51234", "10.0.0.7"),
        ("ipv6:%5B::1%5D:51234", "%5B::1%5D"),
        ("unix:", "unix:"),
        ("unix:/run/bitmill.sock", "unix:/run/bitmill.sock"),
    ],
)
def test_a_caller_without_a_name_is_its_host(peer: str, caller: str) -> None:
    """Connections of one host are one caller."""
    assert request_options(generation_pb2.RequestOptions(), "id", FakeContext(peer)).caller == caller


def test_a_caller_is_who_it_says_up_to_a_length() -> None:
    """The name is a key of counts and logs."""
    context = FakeContext("ipv4:10.0.0.7:1", ("x-caller-id", "x" * 200))
    assert request_options(generation_pb2.RequestOptions(), "id", context).caller == "x" * 128


def test_of_the_metadata_only_the_trace_goes_on() -> None:
    """Credentials stay."""
    context = FakeContext("ipv4:10.0.0.7:1", ("authorization", "secret"), ("traceparent", "00-1-2-01"))
    options = request_options(generation_pb2.RequestOptions(session_id="s"), "id", context)
    assert options.trace_headers == {"traceparent": "00-1-2-01"}
    assert (options.session_id, options.request_id) == ("s", "id")
