"""How the next token is chosen and when to stop, and which of these parameters are valid. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from bitmill_inference.requests.violations import Violations

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_SEQUENCES = 64
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 64
# vLLM tokenizes them on the event loop.
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGPROB_TOKENS = 128
# More than any vocabulary has.
MAX_TOKEN_IDS = 1024 * 1024
MAX_CHOICES = 1024
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1024
# Compiling a form of this size takes seconds; the engine compiles one after the other.
MAX_STRUCTURED_CHARACTERS = 64 * 1024
# Below it, vLLM takes the likeliest token.
GREEDY_TEMPERATURE = 1e-5
SAMPLING_FIELD = "sampling_params"
STRUCTURED_FIELD = f"{SAMPLING_FIELD}.structured_outputs"


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
    """A form that the output must have. `value` is the schema, expression, grammar or tag.

    The texts for CHOICE; true for JSON_OBJECT. A `form` of None is one that the request left out.
    """

    form: OutputForm | None
    value: str | tuple[str, ...] | bool = ""
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


@dataclass(frozen=True)
class ListLimit:
    """Most items of a list, and what they are."""

    limit: int
    items: str


LIST_LIMITS = {
    "stop": ListLimit(MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": ListLimit(MAX_TOKEN_IDS, "tokens"),
    "logit_bias": ListLimit(MAX_BIASED_TOKENS, "tokens"),
    "bad_words": ListLimit(MAX_BAD_WORDS, "words"),
    "allowed_token_ids": ListLimit(MAX_TOKEN_IDS, "tokens"),
    "logprob_token_ids": ListLimit(MAX_LOGPROB_TOKENS, "tokens"),
}


def check_sampling(params: SamplingParams, violations: Violations) -> None:
    """Notes every parameter that no model would take."""
    _check_ranges(params, violations)
    _check_lists(params, violations)
    _check_together(params, violations)
    if params.repetition_detection is not None:
        _check_repetition(params.repetition_detection, violations)
    if params.structured_outputs is not None:
        _check_structured(params.structured_outputs, violations)


def structured_path(form: OutputForm | None) -> str:
    """Returns the path of a form in the request."""
    match form:
        case None:
            return STRUCTURED_FIELD
        case OutputForm.JSON:
            return f"{STRUCTURED_FIELD}.json_schema"
        case OutputForm.CHOICE:
            return f"{STRUCTURED_FIELD}.choice.texts"
    return f"{STRUCTURED_FIELD}.{form.value}"


def is_greedy(temperature: float) -> bool:
    """Whether the likeliest token is taken each time, so that every sequence would be the same."""
    return temperature < GREEDY_TEMPERATURE


def _check_ranges(params: SamplingParams, violations: Violations) -> None:
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
    check("prompt_logprobs", f"from 0 to {MAX_LOGPROBS}", _or(params.prompt_logprobs, 0) <= MAX_LOGPROBS)
    check("n", f"from 1 to {MAX_SEQUENCES}", 1 <= _or(params.n, 1) <= MAX_SEQUENCES)
    check("truncate_prompt_tokens", "at least 1", _or(params.truncate_prompt_tokens, 1) >= 1)
    check("stream_interval", "at least 1", _or(params.stream_interval, 1) >= 1)


def _check_lists(params: SamplingParams, violations: Violations) -> None:
    for name, bound in LIST_LIMITS.items():
        if len(getattr(params, name)) > bound.limit:
            violations.add(f"{SAMPLING_FIELD}.{name}", f"at most {bound.limit} {bound.items}", "TOO_MANY")
    for name, what in (("stop", "a stop string"), ("bad_words", "a word")):
        for index, text in enumerate(getattr(params, name)):
            if not text:
                violations.add(f"{SAMPLING_FIELD}.{name}[{index}]", f"{what} cannot be empty", "EMPTY")
    for index, text in enumerate(params.bad_words):
        if len(text) > MAX_BAD_WORD_CHARACTERS:
            description = f"at most {MAX_BAD_WORD_CHARACTERS} characters, got {len(text)}"
            violations.add(f"{SAMPLING_FIELD}.bad_words[{index}]", description, "TOO_LONG")
    for token_id, bias in params.logit_bias.items():
        violations.range(f"{SAMPLING_FIELD}.logit_bias[{token_id}]", bias, -100 <= bias <= 100, "from -100 to 100")


def _check_together(params: SamplingParams, violations: Violations) -> None:
    def conflict(name: str, description: str) -> None:
        violations.add(f"{SAMPLING_FIELD}.{name}", description, "CONFLICT")

    if params.max_tokens is not None:
        expected = f"at most max_tokens, which is {params.max_tokens}"
        allowed = _or(params.min_tokens, 0) <= params.max_tokens
        violations.range(f"{SAMPLING_FIELD}.min_tokens", params.min_tokens, allowed, expected)
    if params.stop and params.detokenize is False:
        conflict("stop", "stop strings need text; leave detokenize unset or true")
    if params.logprob_token_ids and params.logprobs is not None:
        conflict("logprob_token_ids", "not together with logprobs")
    if params.structured_outputs is not None and params.ignore_eos:
        conflict("ignore_eos", "what comes after the end would not have the form of structured_outputs")
    if _or(params.n, 1) > 1 and is_greedy(_or(params.temperature, 1)):
        conflict("n", "must be 1 with a temperature of 0, which makes every sequence the same")


def _check_repetition(detection: RepetitionDetection, violations: Violations) -> None:
    def check(name: str, expected: str, allowed: bool) -> None:
        path = f"{SAMPLING_FIELD}.repetition_detection.{name}"
        violations.range(path, getattr(detection, name), allowed, expected)

    size = detection.max_pattern_size
    check("max_pattern_size", f"from 1 to {MAX_PATTERN_SIZE}", 1 <= size <= MAX_PATTERN_SIZE)
    check("min_pattern_size", f"at most max_pattern_size, which is {size}", detection.min_pattern_size <= size)
    check("min_count", f"from 2 to {MAX_PATTERN_COUNT}", 2 <= detection.min_count <= MAX_PATTERN_COUNT)


def _check_structured(outputs: StructuredOutputs, violations: Violations) -> None:
    path = structured_path(outputs.form)
    characters = _characters(outputs.value)
    if characters > MAX_STRUCTURED_CHARACTERS:
        violations.add(path, f"at most {MAX_STRUCTURED_CHARACTERS} characters, got {characters}", "TOO_LONG")
    match outputs:
        case StructuredOutputs(form=None):
            violations.add(path, "set one of its forms", "FORM_MISSING")
        case StructuredOutputs(form=OutputForm.JSON_OBJECT, value=value):
            if not value:
                violations.add(path, "must be true; leave structured_outputs unset for no form")
        case StructuredOutputs(form=OutputForm.CHOICE, value=tuple() as texts):
            if not 1 <= len(texts) <= MAX_CHOICES:
                violations.add(path, f"must be 1 to {MAX_CHOICES} texts", "OUT_OF_RANGE")
            for index, text in enumerate(texts):
                if not text:
                    violations.add(f"{path}[{index}]", "a choice cannot be empty", "EMPTY")
        # An empty expression is one that only the empty text matches.
        case StructuredOutputs(form=form, value=str() as value) if form is not OutputForm.REGEX and not value.strip():
            violations.add(path, "cannot be empty", "EMPTY")


def _characters(value: str | tuple[str, ...] | bool) -> int:
    match value:
        case str():
            return len(value)
        case tuple():
            return sum(len(text) for text in value)
    return 0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
