"""What an artifact is: its files and its manifest. Plain data; the manifest's JSON form is in `manifest.py`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bitmill_common.measurements import (
    CalibrationUse,
    Evaluation,
    ModuleResult,
    PhaseCost,
    Sensitivity,
    Verification,
)
from bitmill_common.recipes import Calibration, Recipe

COMPRESSED_TENSORS = "compressed-tensors"
GPTQ_FORMAT = "gptq"
"""Layouts of a quantized model directory, by vLLM's names of the quantization method."""


class Device(enum.Enum):
    """A kind of device that vLLM serves on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class DeviceSupport:
    """One device kind that can serve an artifact.

    `min_compute_capability` is major * 10 + minor for CUDA (75 is Turing) and 0 elsewhere.
    """

    device: Device
    min_compute_capability: int = 0


@dataclass(frozen=True)
class ArtifactFile:
    """One file: path inside the artifact, size in bytes, SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything known about an artifact except where it lies. `digest` is that of `files`, so of the content alone.

    `format` is the layout of the files. `calibration_use` is None when the recipe needed no data; `verification` when
    the server was not told how. `modules` has what became of each layer, `sensitivities` what ADAPTIVE measured.
    `engine_options`: how to serve it, in vLLM's terms, where LoadModel does not say; JSON values. None: nothing.
    """

    name: str
    digest: str
    files: tuple[ArtifactFile, ...]
    source_uri: str
    source_digest: str
    source_size_bytes: int
    recipe: Recipe
    calibration: Calibration
    devices: tuple[DeviceSupport, ...]
    evaluation: Evaluation
    engine: str
    job_id: str
    create_time: datetime
    versions: dict[str, str] = field(default_factory=dict)
    engine_options: Mapping[str, Any] | None = None
    format: str = COMPRESSED_TENSORS
    calibration_use: CalibrationUse | None = None
    modules: tuple[ModuleResult, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    phase_costs: tuple[PhaseCost, ...] = ()
    verification: Verification | None = None

    @property
    def size_bytes(self) -> int:
        """Total size of the files, the manifest left out."""
        return sum(file.size_bytes for file in self.files)
