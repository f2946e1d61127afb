"""Clients that ping a silent stream keep it."""

from __future__ import annotations

from datetime import timedelta

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bitmill_common import server as server_module
from bitmill_common.server import CHANNEL_OPTIONS, MIN_PING_INTERVAL_MS, GrpcServer

# A thousandth of the real interval, so that several strikes fit into the call.
SHORT_MS = MIN_PING_INTERVAL_MS // 1000 * 20
CLIENT_OPTIONS = (
    ("grpc.keepalive_time_ms", SHORT_MS * 2),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


async def silence(options: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch) -> grpc.StatusCode:
    """Pings a server with these options through a silent stream of four seconds; returns how the stream ended."""
    monkeypatch.setattr(server_module, "CHANNEL_OPTIONS", options)
    server = GrpcServer([])
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CLIENT_OPTIONS) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=4)
            with pytest.raises(grpc.aio.AioRpcError) as end:
                async for _ in watch:
                    pass
            return end.value.code()
    finally:
        await server.stop(timedelta(0))


async def test_pings_at_the_allowed_interval_do_not_end_a_silent_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened = tuple((name, SHORT_MS if value == MIN_PING_INTERVAL_MS else value) for name, value in CHANNEL_OPTIONS)
    assert await silence(shortened, monkeypatch) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_pings_far_below_the_allowed_interval_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await silence(CHANNEL_OPTIONS, monkeypatch) is grpc.StatusCode.UNAVAILABLE
