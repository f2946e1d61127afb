"""What a caller asked for, unchecked. None: not given. A number in place of a name is one that no known name has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitmill_common.recipes import ActivationOrder, Algorithm, KvCacheScheme, Packing, Scheme


@dataclass(frozen=True)
class RuleDraft:
    """Another treatment for some of the layers."""

    pattern: str = ""
    scheme: Scheme | int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    algorithm: Algorithm | int | None = None


@dataclass(frozen=True)
class CandidateDraft:
    """One treatment that ADAPTIVE may choose."""

    scheme: Scheme | int | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class AdaptiveDraft:
    """How ADAPTIVE chooses."""

    candidates: tuple[CandidateDraft, ...] = ()
    max_size_bytes: int | None = None
    max_perplexity_ratio: float | None = None
    num_samples: int | None = None


@dataclass(frozen=True)
class RecipeDraft:
    """How to quantize."""

    scheme: Scheme | int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    ignore: tuple[str, ...] = ()
    dampening_frac: float | None = None
    seed: int | None = None
    algorithm: Algorithm | int | None = None
    activation_order: ActivationOrder | int | None = None
    rules: tuple[RuleDraft, ...] = ()
    kv_cache: KvCacheScheme | int | None = None
    smoothing_strength: float | None = None
    adaptive: AdaptiveDraft | None = None


@dataclass(frozen=True)
class CalibrationDraft:
    """What to calibrate with."""

    uri: str = ""
    num_samples: int | None = None
    max_sequence_length: int | None = None
    packing: Packing | int | None = None


@dataclass(frozen=True)
class SpecDraft:
    """What a job would make of what."""

    source_uri: str = ""
    artifact_name: str = ""
    recipe: RecipeDraft = field(default_factory=RecipeDraft)
    calibration: CalibrationDraft = field(default_factory=CalibrationDraft)
    evaluation_tokens: int | None = None
    engine_options: Mapping[str, Any] | None = None
    engine: str = ""
