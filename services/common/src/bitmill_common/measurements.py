"""What a job measured of an artifact: losses, costs, proof that it serves. Plain data, kept in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitmill_common.recipes import Scheme


@dataclass(frozen=True)
class LayerLoss:
    """Squared error of one decoder layer's output relative to that output's own square, on held-out text."""

    layer: str
    relative_error: float


@dataclass(frozen=True)
class Evaluation:
    """Held-out perplexity of source and artifact, KL(source || artifact) in nats, and the tokens behind them.

    `top1_agreement` is the part of the tokens, from 0 to 1, for which both think the same next one the most likely.
    The fields after `num_tokens` are zero and empty in manifests that were written before they existed.
    """

    source_perplexity: float
    artifact_perplexity: float
    mean_kl_divergence: float
    num_tokens: int
    p99_kl_divergence: float = 0.0
    top1_agreement: float = 0.0
    layer_losses: tuple[LayerLoss, ...] = ()


@dataclass(frozen=True)
class CalibrationUse:
    """What calibration really used. `digest` is that of the token ids; no token reached `uncalibrated_modules`."""

    digest: str
    num_samples: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    uncalibrated_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleResult:
    """What became of one layer; the experts of a decoder layer are one, named with "*" for their number.

    `group_size` is 0 where the scheme fixes it. `loss` is GPTQ's. `dampening_frac` is set where more was needed than
    the recipe's. `remark` says why the layer was treated otherwise than the recipe says.
    """

    name: str
    scheme: Scheme
    group_size: int = 0
    loss: float | None = None
    dampening_frac: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL divergence in nats of the whole model when only these modules are rounded to one candidate."""

    modules: tuple[str, ...]
    scheme: Scheme
    group_size: int
    kl_divergence: float
    size_bytes: int
    chosen: bool


@dataclass(frozen=True)
class PhaseCost:
    """What one phase of a job cost; the memory is that of the engine's process and of its GPU."""

    phase: str
    duration_s: float
    peak_memory_bytes: int = 0
    peak_device_memory_bytes: int = 0


@dataclass(frozen=True)
class Verification:
    """What the serving engine generated with the artifact; `skipped` says why it did not, though nothing was wrong."""

    text: str = ""
    num_tokens: int = 0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
