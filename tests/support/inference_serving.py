"""The whole inference server in this process over a real socket, with a fake engine behind the port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bitmill.inference.v1 import (
    inference_service_pb2_grpc,
    model_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
)
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import StoreOptions, Stores
from bitmill_inference.__main__ import build_server
from bitmill_inference.artifacts.artifact_cache import ArtifactCache
from bitmill_inference.artifacts.artifact_source import ArtifactSource
from bitmill_inference.models.load import LoadReport
from bitmill_inference.models.models import Models
from bitmill_inference.requests.admission import DEFAULT_CALLER_LIMIT, Callers
from support.checkpoints import write_checkpoint
from support.fake_inference_engine import FakeEngine, FakeEngineFactory

SERVICE = "bitmill.inference.v1.InferenceService"
TIMEOUT_S = 20


@dataclass
class Serving:
    """A running server: its stubs, its engines, and a store root with one checkpoint in it."""

    root: ObjectStore
    checkpoint: Path
    engines: FakeEngineFactory
    registry: Models
    inference: inference_service_pb2_grpc.InferenceServiceStub
    models: model_service_pb2_grpc.ModelServiceStub
    health: health_pb2_grpc.HealthStub
    channel: grpc.aio.Channel
    load_report: LoadReport

    @property
    def checkpoint_uri(self) -> str:
        return self.checkpoint.as_uri()

    @property
    def engine(self) -> FakeEngine:
        """The engine started last."""
        return self.engines.started[-1]

    async def load(self, name: str = "tiny", uri: str = "", **options: object) -> model_pb2.Model:
        request = model_service_pb2.LoadModelRequest(
            name=name, uri=uri or self.checkpoint_uri, engine_options=model_pb2.EngineOptions(**options)
        )
        return (await self.models.LoadModel(request, timeout=TIMEOUT_S)).model

    async def get(self, name: str = "tiny") -> model_pb2.Model:
        return (await self.models.GetModel(model_service_pb2.GetModelRequest(name=name))).model

    async def list(self) -> list[model_pb2.Model]:
        return list((await self.models.ListModels(model_service_pb2.ListModelsRequest())).models)

    async def unload(self, name: str = "tiny") -> None:
        await self.models.UnloadModel(model_service_pb2.UnloadModelRequest(name=name), timeout=TIMEOUT_S)

    async def is_serving(self, name: str = "tiny") -> bool:
        """What the health service says about a model."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=f"{SERVICE}/{name}"))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def serving(
    tmp_path: Path,
    *,
    roots: tuple[str, ...] = (),
    options: StoreOptions | None = None,
    cache: ArtifactCache | None = None,
    caller_limit: int = DEFAULT_CALLER_LIMIT,
    **wiring: Any,
) -> AsyncIterator[Serving]:
    """Runs a server whose roots are a directory with a checkpoint, and `roots`. `wiring` goes to `build_server`."""
    models_root = tmp_path / "models"
    checkpoint = write_checkpoint(models_root / "plain")
    stores = Stores([models_root.as_uri(), *roots], options or StoreOptions())
    engines = FakeEngineFactory()
    source = ArtifactSource(stores, cache or ArtifactCache(tmp_path / "cache"))
    server, models, load = build_server(source, engines, callers=Callers(caller_limit), **wiring)
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Serving(
                stores.open(models_root.as_uri(), "uri"),
                checkpoint,
                engines,
                models,
                inference_service_pb2_grpc.InferenceServiceStub(channel),
                model_service_pb2_grpc.ModelServiceStub(channel),
                health_pb2_grpc.HealthStub(channel),
                channel,
                load,
            )
    finally:
        await server.stop(timedelta(0))
        await models.stop()


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo in a status."""
    return _detail(error, error_details_pb2.ErrorInfo())


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """The delay in a status's RetryInfo, in seconds."""
    return float(_detail(error, error_details_pb2.RetryInfo()).retry_delay.ToTimedelta().total_seconds())


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The reasons in a status's BadRequest, by field."""
    bad_request = _detail(error, error_details_pb2.BadRequest())
    return {violation.field: violation.reason for violation in bad_request.field_violations}


def _detail(error: grpc.aio.AioRpcError, into: object) -> object:
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    for detail in status.details:
        if detail.Unpack(into):
            return into
    raise AssertionError(f"no {type(into).__name__} in {status}")
