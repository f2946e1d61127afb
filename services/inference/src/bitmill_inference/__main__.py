"""The inference server's composition root: settings in, adapters wired, served until a signal."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import uvloop

from bitmill.inference.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)
from bitmill_common.errors import BitmillError
from bitmill_common.health import HealthServicer
from bitmill_common.interceptors import CallObserver
from bitmill_common.logs import configure_logging
from bitmill_common.server import Binding, GrpcServer, serve_until_signal
from bitmill_common.settings import exit_for_settings, read_settings
from bitmill_common.stores import Stores
from bitmill_inference.artifacts.artifact_cache import ArtifactCache
from bitmill_inference.artifacts.artifact_source import ArtifactSource
from bitmill_inference.inference import FirstTokenObserver, Inference
from bitmill_inference.metrics import Metrics
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.load import LoadReport
from bitmill_inference.models.models import Models
from bitmill_inference.models.preload import preload
from bitmill_inference.models.supervisor import RestartPolicy
from bitmill_inference.ports import EngineFactory
from bitmill_inference.requests.admission import DEFAULT_CALLER_LIMIT, Callers
from bitmill_inference.servicers.convert_model import preload_requests
from bitmill_inference.servicers.health import GrpcModelHealth, server_statuses, unserved_statuses
from bitmill_inference.servicers.inference_servicer import InferenceServicer
from bitmill_inference.servicers.model_servicer import ModelServicer
from bitmill_inference.settings import Settings
from bitmill_inference.vllm.environment import prepare_environment
from bitmill_inference.vllm.runtime_directory import runtime_directory

# The contract of vLLM's own gRPC server, which the extra smg adds.
VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"


def main() -> None:
    """Runs the server; exit code 2 for settings that cannot be used, 1 when it cannot start."""
    settings = read_settings(Settings)
    try:
        stores = Stores(settings.model_roots, settings.store_options)
    except ValueError as error:
        exit_for_settings(Settings, str(error))
    if settings.vllm_service_model and importlib.util.find_spec("smg_grpc_servicer") is None:
        exit_for_settings(Settings, "vllm_service_model needs bitmill-inference's extra smg, which is not installed")
    configure_logging(settings.log_level)
    with runtime_directory(Path(tempfile.gettempdir())) as directory:
        prepare_environment(settings.log_level, directory)
        try:
            uvloop.run(_serve(settings, stores, directory))
        except BitmillError as error:
            sys.exit(f"bitmill-inference: {error.message}")


def build_server(
    source: ArtifactSource,
    engines: EngineFactory,
    *,
    defaults: EngineOptions = EngineOptions(),  # noqa: B008  # immutable
    restarts: RestartPolicy = RestartPolicy(),  # noqa: B008  # immutable
    callers: Callers | None = None,
    awaited: Collection[str] = (),
    further: Callable[[Models], Sequence[Binding]] = lambda models: (),
    services: Mapping[str, str] = {},  # not changed
    on_call: CallObserver = lambda method, code, seconds: None,
    on_first_token: FirstTokenObserver = lambda model, seconds: None,
) -> tuple[GrpcServer, Models, LoadReport]:
    """Wires the services of this server around its models.

    `defaults`: options of engines where nobody says. `awaited`: the models that must have served before the server is
    healthy. `further` adds services on the same models. `on_call` and `on_first_token` are told of each call. Somebody
    has to `run` the load report.
    """
    health_servicer = HealthServicer(server_statuses(not awaited) | unserved_statuses(services))
    models = Models(source, engines, GrpcModelHealth(health_servicer, awaited, services), defaults, restarts)
    load = LoadReport(models)
    inference = InferenceServicer(Inference(models, callers or Callers(DEFAULT_CALLER_LIMIT), on_first_token))
    model = ModelServicer(models, load)
    server = GrpcServer(
        [
            Binding(
                inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
                lambda server: inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server),
            ),
            Binding(
                model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
                lambda server: model_service_pb2_grpc.add_ModelServiceServicer_to_server(model, server),
            ),
            *further(models),
        ],
        health_servicer,
        on_call,
    )
    return server, models, load


async def _serve(settings: Settings, stores: Stores, directory: Path) -> None:
    # Imported once the environment that it reads is prepared.
    from bitmill_inference.vllm.factory import VllmEngineFactory

    source = ArtifactSource(stores, ArtifactCache(settings.cache_dir, settings.cache_max_bytes))
    await asyncio.to_thread(source.sweep)
    requests = preload_requests(settings.models)
    metrics = Metrics()
    server, models, load = build_server(
        source,
        VllmEngineFactory(directory),
        defaults=settings.engine_defaults,
        callers=Callers(settings.max_concurrent_requests_per_caller),
        awaited=[request.name for request in requests],
        further=functools.partial(_vllm_service, settings.vllm_service_model),
        services={settings.vllm_service_model: VLLM_SERVICE} if settings.vllm_service_model else {},
        on_call=metrics.call_ended,
        on_first_token=metrics.first_token,
    )
    _freeze_imports()
    if settings.metrics_address:
        metrics.serve(settings.metrics_address, load, insecure=settings.insecure)
    background = [asyncio.create_task(preload(models, requests)), asyncio.create_task(load.run())]

    async def stop() -> None:
        for task in background:
            task.cancel()
        await metrics.close()
        await models.stop()

    await serve_until_signal(
        server,
        settings.address,
        insecure=settings.insecure,
        grace=timedelta(seconds=settings.drain_grace_s),
        on_stop=stop,
        on_drain=models.begin_stopping,
    )


def _vllm_service(model: str, models: Models) -> Sequence[Binding]:
    if not model:
        return ()
    # Of an extra that need not be installed.
    from bitmill_inference.servicers.smg_engine import SmgServicer
    from bitmill_inference.servicers.smg_servicer import VllmEngineService

    return (VllmEngineService(models, model, SmgServicer).binding,)


def _freeze_imports() -> None:
    """Spares the collector what the imports made, which stays for good.

    A full collection would walk through all of it, and every stream would stand still for about 0.3 s.
    """
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
