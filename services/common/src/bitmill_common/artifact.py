"""What an artifact is: recipe, files, manifest. Plain data; the manifest's JSON form is in `manifest.py`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


class Scheme(enum.Enum):
    """How weights and activations are stored; the values are llm-compressor's and vLLM's names."""

    W4A16 = "W4A16"
    W8A16 = "W8A16"
    W8A8_INT8 = "W8A8_INT8"


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
class Recipe:
    """How to quantize, every default filled in.

    `group_size`: input channels per scale, -1 for one scale per output channel. `ignore`: layer names, or regular
    expressions after "re:". `dampening_frac`: GPTQ damping as a fraction of the mean diagonal of the Hessian.
    """

    scheme: Scheme
    group_size: int
    symmetric: bool = True
    ignore: tuple[str, ...] = ("lm_head",)
    dampening_frac: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Calibration:
    """What GPTQ sees: `num_samples` samples of `max_sequence_length` tokens; no `uri`: Python's own documentation."""

    uri: str = ""
    num_samples: int = 512
    max_sequence_length: int = 2048


@dataclass(frozen=True)
class ArtifactFile:
    """One file: path inside the artifact, size in bytes, SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Evaluation:
    """Held-out perplexity of source and artifact, mean KL(source || artifact) in nats, and the tokens behind them."""

    source_perplexity: float
    artifact_perplexity: float
    mean_kl_divergence: float
    num_tokens: int


@dataclass(frozen=True)
class Manifest:
    """Everything known about an artifact except where it lies. `digest` is that of `files`, so of the content alone.

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
    calibration_digest: str
    devices: tuple[DeviceSupport, ...]
    evaluation: Evaluation
    engine: str
    job_id: str
    create_time: datetime
    versions: dict[str, str] = field(default_factory=dict)
    engine_options: Mapping[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Total size of the files, the manifest left out."""
        return sum(file.size_bytes for file in self.files)
