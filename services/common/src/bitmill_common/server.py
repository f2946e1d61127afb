"""A gRPC server's life: build, bind, announce, serve, drain.

The order at SIGTERM or SIGINT: health turns NOT_SERVING, new calls are refused, running calls get `grace` to end, the
service's own `on_stop` runs, the process exits 0.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection_aio  # type: ignore[attr-defined]  # behind a version check

from bitmill_common import errors
from bitmill_common.health import HealthServicer
from bitmill_common.interceptors import CallInterceptor, CallObserver

log = structlog.get_logger("bitmill.server")

# Room for a prompt of a million token ids; gRPC's own default of 4 MiB ends at a few hundred thousand.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
# Clients may ping a silent stream every 10 s; gRPC's default policy closes such a connection after two pings.
MIN_PING_INTERVAL_MS = 10_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share calls silently.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class Binding:
    """One service: its descriptor, and the call that adds its servicer to a server."""

    descriptor: ServiceDescriptor
    add_to: Callable[[grpc.aio.Server], None]


class GrpcServer:
    """A grpc.aio server with health, reflection, request ids, call logs and status mapping on every service.

    A `health_servicer` of one's own can carry further names beside those of the services. `observer` is told of each
    call that has ended.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        health_servicer: HealthServicer | None = None,
        observer: CallObserver = lambda method, code, seconds: None,
    ) -> None:
        self._server = grpc.aio.server(interceptors=[CallInterceptor(observer)], options=CHANNEL_OPTIONS)
        self._service_names = [binding.descriptor.full_name for binding in bindings]
        for binding in bindings:
            binding.add_to(self._server)
        self.health = health_servicer or HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self._server.add_generic_rpc_handlers(
            _reflection((*self._service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name))
        )

    async def start(self, address: str, *, insecure: bool = False) -> int:
        """Binds `address` (host:port, port 0 for a free one), begins to serve, and returns the port.

        Raises `FailedPreconditionError` for an address that others can reach unless `insecure`, and
        `UnavailableError` when the address is taken.
        """
        check_exposure(address, insecure)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise errors.UnavailableError("ADDRESS_UNAVAILABLE", f"cannot bind {address}: {error}") from error
        await self._server.start()
        await self.health.begin(("", *self._service_names))
        return port

    async def stop(self, grace: timedelta) -> None:
        """Turns health NOT_SERVING, refuses new calls, and ends the running ones after `grace` at the latest."""
        await self.health.drain()
        await self._server.stop(grace.total_seconds())


def _reflection(service_names: Sequence[str]) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """Reflection under both its names, v1 and v1alpha: the messages are the same on the wire."""
    _describe_reflection_v1()
    names = [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]
    servicer = reflection_aio.ReflectionServicer((*service_names, *names))  # type: ignore[attr-defined]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in names)


def _describe_reflection_v1() -> None:
    """Makes v1's descriptors out of v1alpha's: a client that lists every method looks up the listed reflection too."""
    alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    v1 = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(v1.SerializeToString())


def check_exposure(address: str, insecure: bool) -> None:
    """Raises `FailedPreconditionError` for an address that other hosts can reach, unless `insecure`."""
    host = address.rpartition(":")[0].strip("[]")
    if insecure or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise errors.FailedPreconditionError(
            "INSECURE_ADDRESS",
            f"{address} can be reached from other hosts and this server speaks plain text: bind a loopback address, "
            "or say --insecure",
        )


async def serve_until_signal(
    server: GrpcServer,
    address: str,
    *,
    insecure: bool,
    grace: timedelta,
    on_stop: Callable[[], Awaitable[None]],
    on_drain: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, drains, and runs `on_stop`. Logs `server_started` with the real address.

    `on_drain` runs when the drain begins; a service ends there what would otherwise take the whole `grace`.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    try:
        port = await server.start(address, insecure=insecure)
        log.info("server_started", address=f"{address.rpartition(':')[0]}:{port}")
        await stopping.wait()
        log.info("server_draining", grace_s=grace.total_seconds())
        on_drain()
        await server.stop(grace)
    finally:
        await on_stop()
    log.info("server_stopped")
