"""How the engine is to treat a request: what its message says, and what its call brings."""

from __future__ import annotations

from typing import Any, Protocol

from bitmill.inference.v1 import generation_pb2
from bitmill_inference.requests.generation import RequestOptions

CALLER_KEY = "x-caller-id"
MAX_CALLER_CHARACTERS = 128
_TRACE_HEADERS = ("traceparent", "tracestate")


class CallContext(Protocol):
    """What a call brings besides its message; gRPC's own context has it."""

    def invocation_metadata(self) -> Any:
        """Returns the call's metadata, pairs of key and value."""

    def peer(self) -> str:
        """Returns the caller's address: "ipv4:127.0.0.1:1234", "ipv6:%5B::1%5D:1234", "unix:..."."""


def request_options(message: generation_pb2.RequestOptions, request_id: str, context: CallContext) -> RequestOptions:
    """Options of a request, with who asks and the trace that it belongs to."""
    metadata = dict(context.invocation_metadata() or ())
    return RequestOptions(
        adapter=message.adapter,
        priority=message.priority,
        cache_salt=message.cache_salt,
        session_id=message.session_id,
        request_id=request_id,
        caller=str(metadata.get(CALLER_KEY, ""))[:MAX_CALLER_CHARACTERS] or _host(context.peer()),
        trace_headers={key: str(metadata[key]) for key in _TRACE_HEADERS if key in metadata},
    )


def _host(peer: str) -> str:
    """The peer's address without its port, which differs between the connections of one caller."""
    scheme, _, address = peer.partition(":")
    return address.rpartition(":")[0] if scheme in ("ipv4", "ipv6") else peer
