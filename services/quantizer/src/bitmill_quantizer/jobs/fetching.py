"""The phases RESOLVE and FETCH: the source's files, and where they and the calibration data lie on this host."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bitmill_common.artifact import ArtifactFile
from bitmill_common.artifacts import download_files
from bitmill_common.manifest import content_digest
from bitmill_common.object_store import ObjectInfo
from bitmill_quantizer.jobs.job import Progress
from bitmill_quantizer.jobs.workshop import Workshop, byte_counter
from bitmill_quantizer.plans.sources import open_source
from bitmill_quantizer.ports import JobControl, RunningJob
from bitmill_quantizer.recipes.schemes import needs_calibration

_CHUNK_BYTES = 4 << 20
_SOURCE_COPY = "source"
_CALIBRATION_COPY = "calibration"


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
    """Where the source and the calibration data lie on this host, and what the source's content is.

    `source_dir`: the file itself for a source that is one GGUF file.
    """

    source_dir: Path
    source_digest: str
    source_size_bytes: int
    calibration_path: Path | None


def resolve(shop: Workshop, job: RunningJob, control: JobControl) -> Resolved:
    """Looks the source up and lists the files that the job needs."""
    control.check()
    checkpoint = open_source(shop.sources, job.spec.source_uri, "spec.source_uri").inspect()
    control.report(Progress(len(checkpoint.files), len(checkpoint.files), "files"))
    return Resolved(checkpoint.files)


def fetch(shop: Workshop, job: RunningJob, resolved: Resolved, control: JobControl) -> Fetched:
    """Brings source and calibration data to this host's disk and digests the source; local ones are used in place."""
    source = open_source(shop.sources, job.spec.source_uri, "spec.source_uri")
    in_place = source.store.local_path()
    total = resolved.size_bytes * (1 if in_place else 2)
    on_bytes = byte_counter(total, control)
    source_dir = in_place or job.directory / _SOURCE_COPY
    if not in_place:
        shutil.rmtree(source_dir, ignore_errors=True)
        download_files(source.store, resolved.files, source_dir, on_bytes)
    digest = content_digest(_describe(source_dir, resolved.files, on_bytes))
    return Fetched(source_dir / source.file, digest, resolved.size_bytes, _fetch_calibration(shop, job, control))


def _fetch_calibration(shop: Workshop, job: RunningJob, control: JobControl) -> Path | None:
    uri = job.spec.calibration.uri
    if not uri or not needs_calibration(job.spec.recipe):
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
