"""What embedding and scoring are: parameters and results, and which of them are valid. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.requests.generation import Usage
from bitmill_inference.requests.prompts import Prompt, TextPrompt, TokensPrompt
from bitmill_inference.requests.violations import Violations

MAX_INPUTS = 2048


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


def validate_embed(inputs: Sequence[Prompt | None], params: EmbedParams) -> Sequence[Prompt]:
    """Returns the inputs, or raises InvalidArgumentError naming every field that is wrong whatever the model is.

    None stands for an input that is neither text nor token ids.
    """
    violations = Violations()
    _check_count("inputs", len(inputs), violations)
    for index, prompt in enumerate(inputs):
        if prompt in (None, TextPrompt(""), TokensPrompt(())):
            violations.add(input_field(index, prompt), "the input is empty", "PROMPT_EMPTY")
    if params.dimensions is not None:
        violations.range("dimensions", params.dimensions, params.dimensions >= 1, "at least 1")
    _check_truncation(params.truncate_prompt_tokens, violations)
    violations.raise_if_any()
    return [prompt for prompt in inputs if prompt is not None]


def validate_score(query: str, documents: Sequence[str], params: ScoreParams) -> None:
    """Raises InvalidArgumentError naming every field that is wrong whatever the model is."""
    violations = Violations()
    if not query:
        violations.add("query", "the query is empty", "PROMPT_EMPTY")
    _check_count("documents", len(documents), violations)
    for index, document in enumerate(documents):
        if not document:
            violations.add(document_field(index), "the document is empty", "PROMPT_EMPTY")
    _check_truncation(params.truncate_prompt_tokens, violations)
    violations.raise_if_any()


def check_dimensions(dimensions: int | None, full: int, trained: Sequence[int] | None) -> None:
    """Raises InvalidArgumentError for a length that the model's vectors cannot be cut to.

    `full`: their own length. `trained`: the lengths that the model was trained to be cut to; empty for any, None for
    none at all.
    """
    violations = Violations()
    if dimensions is None or (dimensions == full and trained is None):
        return
    if trained is None:
        violations.add(
            "dimensions", f"the model's vectors have {full} values and cannot be cut", "DIMENSIONS_UNSUPPORTED"
        )
    elif trained and dimensions not in trained:
        lengths = ", ".join(map(str, sorted(trained)))
        violations.add("dimensions", f"must be one of {lengths}, got {dimensions}", "DIMENSIONS_UNSUPPORTED")
    else:
        violations.range("dimensions", dimensions, dimensions <= full, f"at most {full}")
    violations.raise_if_any()


def check_input_fits(path: str, prompt_tokens: int, max_model_len: int) -> None:
    """Raises InvalidArgumentError when an input has no token, or more than the model's context holds."""
    if prompt_tokens == 0:
        raise InvalidArgumentError([FieldViolation(path, "the input has no token", "PROMPT_EMPTY")])
    if prompt_tokens > max_model_len:
        raise InvalidArgumentError(
            [
                FieldViolation(
                    path,
                    f"the input has {prompt_tokens} tokens; the model takes {max_model_len} at most",
                    "PROMPT_TOO_LONG",
                )
            ]
        )


def input_field(index: int, prompt: Prompt | None) -> str:
    """Returns the path of an input in its EmbedRequest."""
    match prompt:
        case TextPrompt():
            return f"inputs[{index}].text"
        case TokensPrompt():
            return f"inputs[{index}].token_ids.ids"
    return f"inputs[{index}]"


def document_field(index: int) -> str:
    """Returns the path of a document in its ScoreRequest."""
    return f"documents[{index}]"


def _check_count(path: str, count: int, violations: Violations) -> None:
    if not 1 <= count <= MAX_INPUTS:
        violations.add(path, f"must be 1 to {MAX_INPUTS}", "INVALID_COUNT")


def _check_truncation(tokens: int | None, violations: Violations) -> None:
    if tokens is not None:
        violations.range("truncate_prompt_tokens", tokens, tokens >= 1, "at least 1")
