"""Manifests for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bitmill_common.artifact import ArtifactFile, Device, DeviceSupport, Manifest
from bitmill_common.manifest import content_digest
from bitmill_common.measurements import CalibrationUse, Evaluation
from bitmill_common.recipes import Calibration, Recipe, Scheme

DEFAULT_FILES = (ArtifactFile("config.json", 2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),)


def make_manifest(
    *,
    name: str = "smollm",
    files: Sequence[ArtifactFile] = DEFAULT_FILES,
    recipe: Recipe = Recipe(Scheme.W4A16, 64),  # noqa: B008 (frozen)
    devices: Sequence[DeviceSupport] = (DeviceSupport(Device.CPU), DeviceSupport(Device.CUDA, 75)),
    source_uri: str = "file:///models/smollm",
    job_id: str = "job-1",
    create_time: datetime = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    engine_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Returns a manifest of `files`, with plausible values everywhere else."""
    return Manifest(
        name=name,
        digest=content_digest(files),
        files=tuple(files),
        source_uri=source_uri,
        source_digest="sha256:" + "1" * 64,
        source_size_bytes=1000,
        recipe=recipe,
        calibration=Calibration(num_samples=32, max_sequence_length=512),
        calibration_use=CalibrationUse("sha256:" + "2" * 64),
        devices=tuple(devices),
        evaluation=Evaluation(20.5, 21.25, 0.03125, 4096),
        engine="llmcompressor",
        job_id=job_id,
        create_time=create_time,
        versions={"llmcompressor": "0.14.0.1", "torch": "2.13.0"},
        engine_options=engine_options,
    )
