"""A whole quantizer in this process over a real socket: DBOS on SQLite, local stores, the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

from bitmill.artifact.v1 import artifact_service_pb2_grpc, recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2, quantizer_service_pb2_grpc
from bitmill_common.stores import Stores
from bitmill_quantizer.__main__ import build_server
from bitmill_quantizer.catalog import ArtifactCatalog
from bitmill_quantizer.jobs import pipeline
from bitmill_quantizer.jobs.dbos_jobs import DbosJobs
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.jobs.workshop import Workshop
from bitmill_quantizer.plans.durations import FinishedWork
from bitmill_quantizer.plans.planner import Planner
from bitmill_quantizer.ports import JobBoard
from bitmill_quantizer.processes.engine_process import EngineProcess
from bitmill_quantizer.processes.verifier_process import VerifierProcess
from bitmill_quantizer.recipes.engines import ENGINES
from bitmill_quantizer.service import QuantizationService
from support import fake_quantization_engine as fake_engine
from support.checkpoints import write_checkpoint

DEADLINE_S = 60


@dataclass
class RoomyHost:
    """A machine with room for everything, unless told otherwise."""

    disk_bytes: int = 1 << 50
    total_memory_bytes: int = 1 << 50
    cuda: bool = False
    total_device_memory_bytes: int = 1 << 50

    def free_disk_bytes(self, directory: Path) -> int:
        return self.disk_bytes

    def memory_bytes(self) -> int:
        return self.total_memory_bytes

    def has_cuda(self) -> bool:
        return self.cuda

    def device_memory_bytes(self) -> int:
        return self.total_device_memory_bytes if self.cuda else 0


@dataclass
class RememberedCosts:
    """What jobs took, in memory."""

    finished: list[FinishedWork] = field(default_factory=list)

    def record(self, finished: Sequence[FinishedWork]) -> None:
        self.finished += finished

    def recent(self, phase: JobPhase, kind: str, limit: int) -> Sequence[FinishedWork]:
        found = [each for each in self.finished if (each.work.phase, each.work.kind) == (phase, kind)]
        return found[::-1][:limit]


class Place:
    """The directories of a test's quantizer, with a tiny checkpoint in the source root and the engine installed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = root / "sources"
        self.artifacts = root / "artifacts-root"
        self.work = root / "work"
        self.engine = root / "engine"
        self.source = write_checkpoint(self.sources / "tiny")
        self.engine_python = fake_engine.install(self.engine)
        self.host = RoomyHost()
        self.costs = RememberedCosts()

    def spec(self, name: str = "tiny", **recipe: object) -> quantization_job_pb2.QuantizationSpec:
        """A spec that succeeds."""
        fields = {"scheme": recipe_pb2.SCHEME_W4A16, "group_size": 32} | recipe
        return quantization_job_pb2.QuantizationSpec(
            source_uri=self.source.as_uri(),
            artifact_name=name,
            recipe=recipe_pb2.Recipe(**fields),
            calibration=recipe_pb2.Calibration(num_samples=4, max_sequence_length=32),
            evaluation=quantization_job_pb2.EvaluationSpec(num_tokens=64),
        )

    def workshop(self) -> Workshop:
        """What jobs work with here, in local stores."""
        artifact_root = self.artifacts.as_uri()
        return self.workshop_in(Stores([self.sources.as_uri()]), Stores([artifact_root]), artifact_root)

    def workshop_in(self, sources: Stores, artifacts: Stores, artifact_root: str) -> Workshop:
        """What jobs work with here, in any stores."""
        engines = {name: EngineProcess(name, self.engine_python, "fake_engine", "install it") for name in ENGINES}
        root = artifacts.open(artifact_root, "artifact_root")
        verifier = VerifierProcess(self.engine_python, "fake_verifier", "install it")
        planner = Planner(sources, root, engines, self.host, self.work, self.costs, verifier)
        return Workshop(sources, artifacts, artifact_root, engines, planner, self.costs, verifier)

    def leftovers(self) -> list[str]:
        """What lies in the work directory beside the database and the lock."""
        jobs = self.work / "jobs"
        return sorted(path.name for path in jobs.iterdir()) if jobs.is_dir() else []


@dataclass
class Quantizer:
    """Stubs of a running quantizer, and short forms of its calls."""

    place: Place
    service: QuantizationService
    jobs: quantizer_service_pb2_grpc.QuantizerServiceStub
    artifacts: artifact_service_pb2_grpc.ArtifactServiceStub

    async def create(
        self, spec: quantization_job_pb2.QuantizationSpec, request_id: str = ""
    ) -> quantization_job_pb2.QuantizationJob:
        request = quantizer_service_pb2.CreateQuantizationJobRequest(request_id=request_id, spec=spec)
        return (await self.jobs.CreateQuantizationJob(request, timeout=DEADLINE_S)).job

    async def get(self, job_id: str) -> quantization_job_pb2.QuantizationJob:
        request = quantizer_service_pb2.GetQuantizationJobRequest(job_id=job_id)
        return (await self.jobs.GetQuantizationJob(request, timeout=DEADLINE_S)).job

    async def cancel(self, job_id: str) -> quantization_job_pb2.QuantizationJob:
        request = quantizer_service_pb2.CancelQuantizationJobRequest(job_id=job_id)
        return (await self.jobs.CancelQuantizationJob(request, timeout=DEADLINE_S)).job

    async def watch(self, job_id: str, after_sequence: int = 0) -> AsyncIterator[quantization_job_pb2.JobEvent]:
        request = quantizer_service_pb2.WatchQuantizationJobRequest(job_id=job_id, after_sequence=after_sequence)
        async for response in self.jobs.WatchQuantizationJob(request, timeout=DEADLINE_S):
            yield response.event

    async def history(self, job_id: str, after_sequence: int = 0) -> list[quantization_job_pb2.JobEvent]:
        return [event async for event in self.watch(job_id, after_sequence)]

    async def finished(self, job_id: str) -> quantization_job_pb2.QuantizationJob:
        """Waits for the final state."""
        return (await self.history(job_id))[-1].job

    async def reaches(self, job_id: str, phase: quantization_job_pb2.JobPhase, completed: int = 0) -> None:
        """Waits until a job is that far in a phase."""
        async for event in self.watch(job_id):
            if event.job.phase == phase and event.job.progress.completed >= completed:
                return
        raise AssertionError(f"{job_id} ended before {phase}")


@asynccontextmanager
async def running(place: Place, shop: Workshop | None = None) -> AsyncIterator[Quantizer]:
    """Runs a quantizer on real jobs, in the place's own stores or in others."""
    shop = shop or place.workshop()
    jobs = DbosJobs(f"sqlite:///{place.work}/jobs.sqlite", place.work, partial(pipeline.run_phases, shop))
    await asyncio.to_thread(jobs.start)
    try:
        async with serving(place, jobs, shop) as quantizer:
            yield quantizer
    finally:
        await asyncio.to_thread(jobs.stop)


@asynccontextmanager
async def serving(place: Place, board: JobBoard, shop: Workshop) -> AsyncIterator[Quantizer]:
    """Serves any job board over a socket."""
    service = QuantizationService(board, shop.planner)
    server = build_server(service, ArtifactCatalog(shop.artifacts, shop.artifact_root))
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Quantizer(
                place,
                service,
                quantizer_service_pb2_grpc.QuantizerServiceStub(channel),
                artifact_service_pb2_grpc.ArtifactServiceStub(channel),
            )
    finally:
        service.begin_stopping()
        await server.stop(timedelta(seconds=1))


def details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    """Returns the ErrorInfo and the BadRequest of a failed call."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, bad_request):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    return info, bad_request
