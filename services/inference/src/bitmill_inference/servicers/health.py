"""The health of each model, as a name in `grpc.health.v1` on the same server, and when the server itself is ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grpc_health.v1 import health_pb2

from bitmill.inference.v1 import inference_service_pb2
from bitmill_common.health import HealthServicer

_SERVICE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_Response = health_pb2.HealthCheckResponse


def service_name(model: str) -> str:
    """The name that Check and Watch know a model or an alias by: `bitmill.inference.v1.InferenceService/<name>`."""
    return f"{_SERVICE}/{model}"


def server_statuses(serving: bool) -> dict[str, int]:
    """The health of the server as a whole: under the empty name and InferenceService's."""
    return dict.fromkeys(("", _SERVICE), _status(serving))


def unserved_statuses(services: Mapping[str, str]) -> dict[str, int]:
    """The health of services that wait for their model; `services` as of `GrpcModelHealth`."""
    return dict.fromkeys(services.values(), _status(False))


class GrpcModelHealth:
    """A `ModelHealth` on a health servicer.

    The server as a whole turns SERVING when each of the `awaited` models has served once; from then on each model
    answers for itself. `services`: names of services that one model serves, by its name or alias; they have its health.
    """

    def __init__(
        self,
        servicer: HealthServicer,
        awaited: Collection[str] = (),
        services: Mapping[str, str] = {},  # not changed
    ) -> None:
        self._servicer = servicer
        self._services = services
        self._awaited = set(awaited)

    async def set_serving(self, model: str, serving: bool) -> None:
        """See `ModelHealth.set_serving`."""
        await self._servicer.set(service_name(model), _status(serving))
        if model in self._services:
            await self._servicer.set(self._services[model], _status(serving))
        if serving and model in self._awaited:
            self._awaited.remove(model)
            if not self._awaited:
                for name, status in server_statuses(True).items():
                    await self._servicer.set(name, status)


def _status(serving: bool) -> int:
    status: int = _Response.SERVING if serving else _Response.NOT_SERVING
    return status
