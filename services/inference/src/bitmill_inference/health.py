"""The health of each model, as a name in `grpc.health.v1` on the same server."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from bitmill.inference.v1 import inference_service_pb2
from bitmill_common.health import HealthServicer

_SERVICE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


def service_name(model: str) -> str:
    """The name that Check and Watch know a model by: `bitmill.inference.v1.InferenceService/<model>`."""
    return f"{_SERVICE}/{model}"


class GrpcModelHealth:
    """A `ModelHealth` on a health servicer."""

    def __init__(self, servicer: HealthServicer) -> None:
        self._servicer = servicer

    async def set_serving(self, model: str, serving: bool) -> None:
        """See `ModelHealth.set_serving`."""
        statuses = health_pb2.HealthCheckResponse
        await self._servicer.set(service_name(model), statuses.SERVING if serving else statuses.NOT_SERVING)
