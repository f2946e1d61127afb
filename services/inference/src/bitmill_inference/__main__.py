"""The inference server's composition root: settings in, adapters wired, served until a signal."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import uvloop

from bitmill.inference.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)
from bitmill_common.errors import BitmillError
from bitmill_common.health import HealthServicer
from bitmill_common.logs import configure_logging
from bitmill_common.server import Binding, GrpcServer, serve_until_signal
from bitmill_common.settings import exit_for_settings, read_settings
from bitmill_common.stores import Stores
from bitmill_inference.artifact_source import ArtifactSource
from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.engine_process import LOG_LEVEL_VARIABLE
from bitmill_inference.health import GrpcModelHealth
from bitmill_inference.inference import Inference
from bitmill_inference.model_servicer import ModelServicer
from bitmill_inference.models import Models
from bitmill_inference.ports import EngineFactory
from bitmill_inference.servicer import InferenceServicer
from bitmill_inference.settings import Settings

# Read by vLLM and its libraries when they are imported, and by the engine's processes.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM's log lines go through our own handlers, here and in its processes.
    "VLLM_CONFIGURE_LOGGING": "0",
    # The server has threads; a forked child of it may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Would overrule the KV cache size of every model on the CPU.
_OVERRULING_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def main() -> None:
    """Runs the server; exit code 2 for settings that cannot be used, 1 when it cannot start."""
    settings = read_settings(Settings)
    try:
        stores = Stores(settings.model_roots, settings.store_options)
    except ValueError as error:
        exit_for_settings(Settings, str(error))
    configure_logging(settings.log_level)
    _prepare_environment(settings.log_level)
    try:
        uvloop.run(_serve(settings, stores))
    except BitmillError as error:
        sys.exit(f"bitmill-inference: {error.message}")


def build_server(source: ArtifactSource, engines: EngineFactory) -> tuple[GrpcServer, Models]:
    """Wires the services of this server around its models."""
    health_servicer = HealthServicer()
    models = Models(source, engines, GrpcModelHealth(health_servicer))
    inference = InferenceServicer(Inference(models))
    model = ModelServicer(models)
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
        ],
        health_servicer,
    )
    return server, models


async def _serve(settings: Settings, stores: Stores) -> None:
    # Imported once the environment that it reads is prepared.
    from bitmill_inference.vllm_factory import VllmEngineFactory

    defaults = EngineOptions(kv_cache_memory_bytes=settings.kv_cache_memory_bytes, enforce_eager=settings.enforce_eager)
    server, models = build_server(ArtifactSource(stores, settings.cache_dir), VllmEngineFactory(defaults))
    await serve_until_signal(
        server,
        settings.address,
        insecure=settings.insecure,
        grace=timedelta(seconds=settings.drain_grace_s),
        on_stop=models.stop,
        on_drain=models.begin_stopping,
    )


def _prepare_environment(log_level: str) -> None:
    os.environ.update(_ENVIRONMENT)
    os.environ[LOG_LEVEL_VARIABLE] = log_level
    os.environ.pop(_OVERRULING_VARIABLE, None)


if __name__ == "__main__":
    main()
