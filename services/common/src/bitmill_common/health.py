"""`grpc.health.v1`, with watches that end when the server drains.

The servicer of grpcio-health-checking never ends a watch, so that a single watcher would hold every stop of a server
for its whole grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health of the server, under the empty name, and of each name that was set. `statuses` are the first ones."""

    def __init__(self, statuses: Mapping[str, int] | None = None) -> None:
        self._statuses = dict(statuses or {})
        self._changed = asyncio.Condition()
        self._draining = False

    async def set(self, name: str, status: int) -> None:
        """Sets the status of a name and tells its watchers. Without effect while the server drains."""
        async with self._changed:
            if not self._draining:
                self._statuses[name] = status
                self._changed.notify_all()

    async def begin(self, names: Iterable[str]) -> None:
        """Turns each of the names SERVING that has no status yet."""
        for name in names:
            if name not in self._statuses:
                await self.set(name, _Response.SERVING)

    async def drain(self) -> None:
        """Turns every name NOT_SERVING for good; watches end once they have told it."""
        async with self._changed:
            self._draining = True
            self._statuses = dict.fromkeys(self._statuses, _Response.NOT_SERVING)
            self._changed.notify_all()

    async def Check(  # noqa: N802  # the name in the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        """Answers the status of a name; NOT_FOUND for one that was never set."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return _Response(status=self._statuses[request.service])

    async def Watch(  # noqa: N802  # the name in the proto
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Streams the status of a name and each change; SERVICE_UNKNOWN while it was never set."""
        told: int | None = None
        while True:
            async with self._changed:
                while not self._draining and self._status(request.service) == told:
                    await self._changed.wait()
                status, draining = self._status(request.service), self._draining
            if status != told:
                told = status
                yield _Response(status=status)
            if draining:
                return

    def _status(self, name: str) -> int:
        unknown: int = _Response.SERVICE_UNKNOWN
        return self._statuses.get(name, unknown)
