"""The quantizer server's composition root: settings in, adapters wired, served until a signal."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

from bitmill.artifact.v1 import artifact_service_pb2, artifact_service_pb2_grpc
from bitmill.quantizer.v1 import quantizer_service_pb2, quantizer_service_pb2_grpc
from bitmill_common.errors import BitmillError
from bitmill_common.logs import configure_logging
from bitmill_common.server import Binding, GrpcServer, serve_until_signal
from bitmill_common.settings import exit_for_settings, read_settings
from bitmill_common.stores import Stores
from bitmill_quantizer.catalog import ArtifactCatalog
from bitmill_quantizer.host import LinuxHost
from bitmill_quantizer.jobs import pipeline
from bitmill_quantizer.jobs.cost_ledger import CostLedger
from bitmill_quantizer.jobs.dbos_jobs import DbosJobs
from bitmill_quantizer.jobs.workshop import Workshop
from bitmill_quantizer.plans.planner import Planner
from bitmill_quantizer.processes.engine_process import EngineProcess
from bitmill_quantizer.processes.verifier_process import VerifierProcess
from bitmill_quantizer.service import QuantizationService
from bitmill_quantizer.servicers.artifact_servicer import ArtifactServicer
from bitmill_quantizer.servicers.quantizer_servicer import QuantizerServicer
from bitmill_quantizer.settings import Settings

# Watchers and calls wait in threads for the database and the stores; each is short except for verifications.
_CALL_THREADS = 32


def main() -> None:
    """Runs the server; exit code 2 for settings that cannot be used, 1 when it cannot start."""
    settings = read_settings(Settings)
    try:
        shop = build_workshop(settings)
    except ValueError as error:
        exit_for_settings(Settings, str(error))
    configure_logging(settings.log_level)
    try:
        asyncio.run(_serve(settings, shop))
    except BitmillError as error:
        sys.exit(f"bitmill-quantizer: {error.message}")


def build_workshop(settings: Settings) -> Workshop:
    """Wires what jobs work with. `ValueError` for roots or store options that cannot be used."""
    sources = Stores(settings.source_roots, settings.store_options)
    artifacts = Stores([settings.artifact_root], settings.store_options)
    engines = {name: _engine(name, python) for name, python in settings.engine_pythons.items()}
    root = artifacts.open(settings.artifact_root, "artifact_root")
    verifier = _verifier(settings.verifier_python) if settings.verifier_python else None
    costs = CostLedger(settings.resolved_database_url, settings.worker_id)
    planner = Planner(sources, root, engines, LinuxHost(), settings.work_dir, costs, verifier)
    return Workshop(sources, artifacts, settings.artifact_root, engines, planner, costs, verifier)


def _engine(name: str, python: Path) -> EngineProcess:
    variable = f"BITMILL_QUANTIZER_{name.upper()}_PYTHON"
    hint = f"`make setup-engine-{name}` installs it; {variable} names another interpreter"
    return EngineProcess(name, python, f"bitmill_engine_{name}", hint)


def _verifier(python: Path) -> VerifierProcess:
    hint = "`make setup` installs it; BITMILL_QUANTIZER_VERIFIER_PYTHON names another interpreter, or none"
    return VerifierProcess(python, "bitmill_inference.verify", hint)


def build_server(service: QuantizationService, catalog: ArtifactCatalog) -> GrpcServer:
    """Wires the services of this server."""
    quantizer = QuantizerServicer(service)
    artifact = ArtifactServicer(catalog)
    return GrpcServer(
        [
            Binding(
                quantizer_service_pb2.DESCRIPTOR.services_by_name["QuantizerService"],
                partial(quantizer_service_pb2_grpc.add_QuantizerServiceServicer_to_server, quantizer),
            ),
            Binding(
                artifact_service_pb2.DESCRIPTOR.services_by_name["ArtifactService"],
                partial(artifact_service_pb2_grpc.add_ArtifactServiceServicer_to_server, artifact),
            ),
        ]
    )


async def _serve(settings: Settings, shop: Workshop) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_CALL_THREADS, "call"))
    jobs = DbosJobs(
        settings.resolved_database_url,
        settings.work_dir,
        partial(pipeline.run_phases, shop),
        worker_id=settings.worker_id,
        concurrency=settings.concurrency,
    )
    service = QuantizationService(jobs, shop.planner)
    server = build_server(service, ArtifactCatalog(shop.artifacts, settings.artifact_root))
    await asyncio.to_thread(jobs.start)
    await serve_until_signal(
        server,
        settings.address,
        insecure=settings.insecure,
        grace=timedelta(seconds=settings.drain_grace_s),
        on_drain=service.begin_stopping,
        on_stop=partial(asyncio.to_thread, jobs.stop),
    )


if __name__ == "__main__":
    main()
