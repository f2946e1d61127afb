"""What embedding and scoring are: parameters and results, and which of them are valid. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_inference.generation import Usage


@dataclass(frozen=True)
class EmbedParams:
    """How to embed. None takes the model's own; `truncate_prompt_tokens` None keeps every token."""

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True)
class ScoreParams:
    """How to score. `truncate_prompt_tokens` None keeps every token."""

    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True)
class Embedded:
    """One vector for each input, shape [inputs, dimensions], and the token counts of all inputs."""

    vectors: Sequence[Sequence[float]]
    usage: Usage


@dataclass(frozen=True)
class Scored:
    """One score for each document, and the token counts of all pairs."""

    scores: Sequence[float]
    usage: Usage
