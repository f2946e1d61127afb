"""The phases of a job, as plain functions, each of which may be run again from its start at any time.

A phase removes what an earlier run of itself left, so a worker that died in it is followed by another without harm.
What a phase returns is recorded, and is all that later phases know of it besides the files in the job's directory.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bitmill_common import uris
from bitmill_common.artifact import ArtifactFile, DeviceSupport, Manifest
from bitmill_common.artifacts import (
    artifact_path,
    describe_files,
    download_files,
    publish_manifest,
    read_manifest,
    upload_files,
)
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, InternalError, NotFoundError, UnavailableError
from bitmill_common.manifest import content_digest
from bitmill_common.measurements import Evaluation
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_common.stores import Stores
from bitmill_quantizer import preflight
from bitmill_quantizer.jobs import JobPhase, Progress
from bitmill_quantizer.planner import Planner
from bitmill_quantizer.ports import Engine, JobControl, QuantizeOutcome, RunningJob, StepRunner

_CHUNK_BYTES = 4 << 20
_SOURCE_COPY = "source"
_CALIBRATION_COPY = "calibration"


@dataclass(frozen=True)
class Workshop:
    """Everything that the phases work with."""

    sources: Stores
    artifacts: Stores
    artifact_root: str
    engine: Engine
    planner: Planner

    def artifact_store(self, path: str = "") -> ObjectStore:
        """Returns the store of the artifact root, or of a path below it."""
        return self.artifacts.open(uris.join(self.artifact_root, path), "artifact_root")


@dataclass(frozen=True)
class Resolved:
    """The source's files that the job needs."""

    files: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Their total size."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Fetched:
    """Where the source and the calibration text lie on this host, and what the source's content is."""

    source_dir: Path
    source_digest: str
    source_size_bytes: int
    calibration_path: Path | None


@dataclass(frozen=True)
class Checked:
    """What preflight found."""

    devices: tuple[DeviceSupport, ...]


@dataclass(frozen=True)
class Quantized:
    """The model directory that the engine wrote."""

    model_dir: Path
    outcome: QuantizeOutcome


@dataclass(frozen=True)
class Published:
    """The artifact's URI."""

    uri: str


def run_phases(shop: Workshop, job: RunningJob, step: StepRunner) -> str:
    """Runs a job through all its phases and returns the artifact's URI."""
    resolved = step(JobPhase.RESOLVE, Resolved, lambda control: resolve(shop, job, control))
    fetched = step(JobPhase.FETCH, Fetched, lambda control: fetch(shop, job, resolved, control))
    checked = step(JobPhase.PREFLIGHT, Checked, lambda control: check(shop, job, control))
    quantized = step(JobPhase.QUANTIZE, Quantized, lambda control: quantize(shop, job, fetched, control))
    evaluation = step(JobPhase.EVALUATE, Evaluation, lambda control: evaluate(shop, job, fetched, quantized, control))
    manifest = step(
        JobPhase.SAVE,
        Manifest,
        lambda control: save(shop, job, fetched, checked, quantized, evaluation, control),
    )
    step(JobPhase.UPLOAD, Published, lambda control: upload(shop, quantized, manifest, control))
    return step(JobPhase.PUBLISH, Published, lambda control: publish(shop, manifest, control)).uri


def resolve(shop: Workshop, job: RunningJob, control: JobControl) -> Resolved:
    """Looks the source up and lists the files that the job needs."""
    control.check()
    checkpoint = inspect_checkpoint(shop.sources.open(job.spec.source_uri, "spec.source_uri"))
    control.report(Progress(len(checkpoint.files), len(checkpoint.files), "files"))
    return Resolved(checkpoint.files)


def fetch(shop: Workshop, job: RunningJob, resolved: Resolved, control: JobControl) -> Fetched:
    """Brings source and calibration text to this host's disk and digests the source; local ones are used in place."""
    store = shop.sources.open(job.spec.source_uri, "spec.source_uri")
    in_place = store.local_path()
    total = resolved.size_bytes * (1 if in_place else 2)
    on_bytes = _byte_counter(total, control)
    source_dir = in_place or job.directory / _SOURCE_COPY
    if not in_place:
        shutil.rmtree(source_dir, ignore_errors=True)
        download_files(store, resolved.files, source_dir, on_bytes)
    digest = content_digest(_describe(source_dir, resolved.files, on_bytes))
    return Fetched(source_dir, digest, resolved.size_bytes, _fetch_calibration(shop, job, control))


def _fetch_calibration(shop: Workshop, job: RunningJob, control: JobControl) -> Path | None:
    uri = job.spec.calibration.uri
    if not uri:
        return None
    store, name = shop.sources.open_file(uri, "spec.calibration.uri")
    if in_place := store.local_path(name):
        return in_place
    target = job.directory / f"{_CALIBRATION_COPY}{Path(name).suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    store.download(name, target, lambda count: control.check())
    return target


def _describe(directory: Path, files: Iterable[ObjectInfo], on_bytes: Callable[[int], None]) -> Iterator[ArtifactFile]:
    for file in files:
        digest = hashlib.sha256()
        with (directory / file.path).open("rb", buffering=0) as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
                on_bytes(len(chunk))
        yield ArtifactFile(file.path, file.size_bytes, digest.hexdigest())


def check(shop: Workshop, job: RunningJob, control: JobControl) -> Checked:
    """Plans the job once more, on the host that runs it, and raises what stands in its way."""
    control.check()
    plan = shop.planner.plan(job.spec)
    preflight.raise_for(plan.problems)
    return Checked(plan.devices)


def quantize(shop: Workshop, job: RunningJob, fetched: Fetched, control: JobControl) -> Quantized:
    """Runs the engine into a fresh directory, since one that is dying may still write to the last."""
    for stale in job.directory.glob("model-*"):
        shutil.rmtree(stale, ignore_errors=True)
    job.directory.mkdir(parents=True, exist_ok=True)
    model_dir = job.directory / f"model-{secrets.token_hex(4)}"
    spec = job.spec
    outcome = shop.engine.quantize(
        _require(fetched.source_dir),
        model_dir,
        spec.recipe,
        spec.calibration,
        fetched.calibration_path and _require(fetched.calibration_path),
        control,
    )
    return Quantized(model_dir, outcome)


def evaluate(
    shop: Workshop, job: RunningJob, fetched: Fetched, quantized: Quantized, control: JobControl
) -> Evaluation:
    """Compares the result with the source on held-out text."""
    outcome = shop.engine.evaluate(
        _require(fetched.source_dir),
        _require(quantized.model_dir),
        job.spec.evaluation_tokens,
        job.spec.calibration.max_sequence_length,
        control,
    )
    return outcome.evaluation


def _require(path: Path) -> Path:
    if not path.exists():
        raise FailedPreconditionError(
            "WORK_LOST", f"{path}, which an earlier phase left, is gone: create the job again", {"path": str(path)}
        )
    return path


def save(
    shop: Workshop,
    job: RunningJob,
    fetched: Fetched,
    checked: Checked,
    quantized: Quantized,
    evaluation: Evaluation,
    control: JobControl,
) -> Manifest:
    """Digests the result's files and composes the manifest."""
    model_dir = _require(quantized.model_dir)
    _check_model(model_dir)
    total = sum(path.stat().st_size for path in model_dir.rglob("*") if path.is_file())
    files = describe_files(model_dir, _byte_counter(total, control))
    return Manifest(
        name=job.spec.artifact_name,
        digest=content_digest(files),
        files=files,
        source_uri=job.spec.source_uri,
        source_digest=fetched.source_digest,
        source_size_bytes=fetched.source_size_bytes,
        recipe=job.spec.recipe,
        calibration=job.spec.calibration,
        calibration_use=quantized.outcome.calibration_use,
        format=quantized.outcome.format,
        modules=quantized.outcome.modules,
        sensitivities=quantized.outcome.sensitivities,
        devices=checked.devices,
        evaluation=evaluation,
        engine=shop.engine.name,
        job_id=job.job_id,
        create_time=datetime.now(UTC),
        versions=quantized.outcome.versions,
        engine_options=job.spec.engine_options,
    )


def _check_model(model_dir: Path) -> None:
    config_path = model_dir / "config.json"
    config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
    if not config.get("quantization_config") or not any(model_dir.glob("*.safetensors")):
        raise InternalError("ENGINE_OUTPUT_INVALID", "the engine ended well and left no quantized model directory")


def upload(shop: Workshop, quantized: Quantized, manifest: Manifest, control: JobControl) -> Published:
    """Writes the files to the store, unless the same artifact is published already."""
    path = artifact_path(manifest.name, manifest.digest)
    published = shop.artifact_store(path)
    if not _is_published(published):
        on_bytes = _byte_counter(manifest.size_bytes, control)
        upload_files(shop.artifact_store(), path, _require(quantized.model_dir), manifest.files, on_bytes)
    return Published(published.uri)


def publish(shop: Workshop, manifest: Manifest, control: JobControl) -> Published:
    """Writes the manifest, after which the artifact exists. An equal one that exists already keeps its manifest."""
    control.begin_publishing()
    published = shop.artifact_store(artifact_path(manifest.name, manifest.digest))
    if not _is_published(published):
        try:
            publish_manifest(shop.artifact_store(), manifest)
        except UnavailableError:
            # The write may have arrived and only its answer been lost; then the artifact exists.
            if not _is_published(published):
                raise
    return Published(published.uri)


def _is_published(store: ObjectStore) -> bool:
    try:
        read_manifest(store)
    except NotFoundError:
        return False
    return True


def _byte_counter(total: int, control: JobControl) -> Callable[[int], None]:
    completed = 0

    def on_bytes(count: int) -> None:
        nonlocal completed
        control.check()
        completed += count
        control.report(Progress(min(completed, total), total, "bytes"))

    return on_bytes
