"""How the next token is chosen and when to stop, and which of these parameters are valid. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from bitmill_inference.violations import Violations

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
SAMPLING_FIELD = "sampling_params"


class OutputForm(enum.Enum):
    """The kinds of `StructuredOutputs`, by vLLM's names."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class StructuredOutputs:
    """A form that the output must have. `value` is the schema, expression, grammar or tag; the texts for CHOICE."""

    form: OutputForm
    value: str | tuple[str, ...]
    disable_any_whitespace: bool = False


@dataclass(frozen=True)
class RepetitionDetection:
    """When a sequence counts as repeating itself; `generation.proto` has the rules."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. None takes the model's generation_config, then vLLM's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    stream_interval: int | None = None
    repetition_detection: RepetitionDetection | None = None


def check_sampling(params: SamplingParams, violations: Violations) -> None:
    """Notes every parameter that no model would take."""

    def check(name: str, expected: str, allowed: bool) -> None:
        violations.range(f"{SAMPLING_FIELD}.{name}", getattr(params, name), allowed, expected)

    check("temperature", "from 0 to 2", 0 <= _or(params.temperature, 0) <= 2)
    check("top_p", "above 0 and at most 1", 0 < _or(params.top_p, 1) <= 1)
    check("top_k", "at least 1, or 0 or -1 for all", _or(params.top_k, 0) >= -1)
    check("min_p", "from 0 to 1", 0 <= _or(params.min_p, 0) <= 1)
    check("max_tokens", "at least 1", _or(params.max_tokens, 1) >= 1)
    check("presence_penalty", "from -2 to 2", -2 <= _or(params.presence_penalty, 0) <= 2)
    check("frequency_penalty", "from -2 to 2", -2 <= _or(params.frequency_penalty, 0) <= 2)
    check("repetition_penalty", "above 0", _or(params.repetition_penalty, 1) > 0)
    check("logprobs", f"from 0 to {MAX_LOGPROBS}", _or(params.logprobs, 0) <= MAX_LOGPROBS)
    if params.max_tokens is not None:
        expected = f"at most max_tokens, which is {params.max_tokens}"
        check("min_tokens", expected, _or(params.min_tokens, 0) <= params.max_tokens)
    if len(params.stop) > MAX_STOP_STRINGS:
        violations.add(f"{SAMPLING_FIELD}.stop", f"at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}")
    for index, text in enumerate(params.stop):
        if not text:
            violations.add(f"{SAMPLING_FIELD}.stop[{index}]", "a stop string cannot be empty")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
