"""What an artifact is made by: the recipe and the calibration. Plain data, every default filled in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

PER_CHANNEL = -1
"""The group size that stands for one scale per output channel."""

FIXED_GROUP_SIZE = 0
"""The group size of schemes whose scales have one layout only."""


class Scheme(enum.Enum):
    """How weights and activations are stored; the values are llm-compressor's and vLLM's names."""

    W4A16 = "W4A16"
    W8A16 = "W8A16"
    W8A8_INT8 = "W8A8_INT8"
    FP8_DYNAMIC = "FP8_DYNAMIC"
    FP8_STATIC = "FP8_STATIC"
    FP8_BLOCK = "FP8_BLOCK"
    NVFP4A16 = "NVFP4A16"
    MXFP4A16 = "MXFP4A16"
    UNQUANTIZED = "UNQUANTIZED"
    ADAPTIVE = "ADAPTIVE"


class Algorithm(enum.Enum):
    """How weights are rounded to a scheme's grid. NONE: there is nothing to round."""

    GPTQ = "GPTQ"
    AWQ = "AWQ"
    RTN = "RTN"
    NONE = "NONE"


class ActivationOrder(enum.Enum):
    """The order in which GPTQ rounds a layer's input channels."""

    NONE = "NONE"
    STATIC = "STATIC"
    GROUP = "GROUP"


class KvCacheScheme(enum.Enum):
    """How keys and values are stored when served."""

    FP8 = "FP8"


class Packing(enum.Enum):
    """How samples are made of documents."""

    CONCATENATE = "CONCATENATE"
    TRUNCATE = "TRUNCATE"


@dataclass(frozen=True)
class Treatment:
    """What is done to a layer. `group_size`: input channels per scale, PER_CHANNEL or FIXED_GROUP_SIZE."""

    scheme: Scheme
    algorithm: Algorithm
    group_size: int
    symmetric: bool = True


@dataclass(frozen=True)
class ModuleRule:
    """Another treatment for the layers that a pattern matches: a module's name, or a regex after "re:"."""

    pattern: str
    treatment: Treatment


@dataclass(frozen=True)
class AdaptiveSearch:
    """What ADAPTIVE chooses from, and the one budget that is not None."""

    candidates: tuple[Treatment, ...]
    max_size_bytes: int | None = None
    max_perplexity_ratio: float | None = None
    num_samples: int = 8


@dataclass(frozen=True)
class Recipe:
    """How to quantize, every default filled in.

    `group_size`: input channels per scale, PER_CHANNEL or FIXED_GROUP_SIZE. `ignore`: layer names, or regular
    expressions after "re:"; it goes before `rules`, of which the first that matches counts. `dampening_frac`: GPTQ
    damping as a fraction of the mean diagonal of the Hessian. `smoothing_strength`: SmoothQuant's, 0 for none.
    """

    scheme: Scheme
    group_size: int
    symmetric: bool = True
    ignore: tuple[str, ...] = ("lm_head",)
    dampening_frac: float = 0.01
    seed: int = 0
    algorithm: Algorithm = Algorithm.GPTQ
    activation_order: ActivationOrder = ActivationOrder.STATIC
    rules: tuple[ModuleRule, ...] = ()
    kv_cache: KvCacheScheme | None = None
    smoothing_strength: float = 0.0
    adaptive: AdaptiveSearch | None = None

    @property
    def treatment(self) -> Treatment:
        """What is done to layers that no rule names."""
        return Treatment(self.scheme, self.algorithm, self.group_size, self.symmetric)


@dataclass(frozen=True)
class Calibration:
    """What the model sees: `num_samples` samples of up to `max_sequence_length` tokens.

    No `uri`: the engine's own text, Python's documentation first.
    """

    uri: str = ""
    num_samples: int = 512
    max_sequence_length: int = 2048
    packing: Packing = Packing.CONCATENATE
