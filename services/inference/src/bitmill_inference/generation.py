"""What a generation is: prompts, sampling parameters, chunks; and which of them are valid. Plain data."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bitmill_common.errors import FieldViolation, InvalidArgumentError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
SAMPLING_FIELD = "sampling_params"


@dataclass(frozen=True)
class TextPrompt:
    """Text; the model's special tokens are added unless `add_special_tokens` is false."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation: who speaks, and what."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, turned into tokens by the model's own chat template. `field` is its path in the request."""

    messages: tuple[ChatMessage, ...]
    field: str = "messages"


Prompt = TextPrompt | TokensPrompt | ChatPrompt


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


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Finish:
    """How a sequence ended. `stop_match`: the string or token id that matched; None for the end-of-sequence token."""

    reason: FinishReason
    stop_match: str | int | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log probability and its rank in the vocabulary; rank 1 is the likeliest."""

    token_id: int
    token: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities at one position: the chosen token, and the likeliest ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class Chunk:
    """What is new in one sequence. `finish` is set in the sequence's last chunk, `usage` in the call's last."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] = ()
    finish: Finish | None = None
    usage: Usage | None = None


@dataclass
class Violations:
    """Collects what is wrong with a request, so that its caller learns everything at once."""

    found: list[FieldViolation] = field(default_factory=list)

    def add(self, path: str, description: str, reason: str = "INVALID_FIELD") -> None:
        """Notes one wrong field."""
        self.found.append(FieldViolation(path, description, reason))

    def range(self, path: str, value: float | None, allowed: bool, expected: str) -> None:
        """Notes `value` when it is set and not finite or not allowed."""
        if value is not None and not (math.isfinite(value) and allowed):
            self.add(path, f"must be {expected}, got {value:g}", "OUT_OF_RANGE")

    def raise_if_any(self) -> None:
        """Raises InvalidArgumentError with everything found."""
        if self.found:
            raise InvalidArgumentError(self.found)


def validate(prompt: Prompt, params: SamplingParams) -> None:
    """Raises InvalidArgumentError naming every field that is wrong whatever the model is."""
    violations = Violations()
    check_prompt(prompt, violations)
    _check_sampling(params, violations)
    violations.raise_if_any()


def check_prompt(prompt: Prompt, violations: Violations) -> None:
    """Notes a prompt that is empty, or a message without a role."""
    match prompt:
        case TextPrompt(text=""):
            violations.add("text", "the prompt is empty", "PROMPT_EMPTY")
        case TokensPrompt(token_ids=()):
            violations.add("token_ids.ids", "the prompt is empty", "PROMPT_EMPTY")
        case ChatPrompt(messages=(), field=path):
            violations.add(path, "the conversation has no message", "PROMPT_EMPTY")
        case ChatPrompt(messages=messages, field=path):
            for index, message in enumerate(messages):
                if not message.role:
                    violations.add(f"{path}[{index}].role", "a message needs a role")


def _check_sampling(params: SamplingParams, violations: Violations) -> None:
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


def prompt_field(prompt: Prompt) -> str:
    """Returns the path of the prompt in its request."""
    match prompt:
        case TextPrompt():
            return "text"
        case TokensPrompt():
            return "token_ids.ids"
        case ChatPrompt(field=path):
            return path


def check_vocabulary(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError naming the first id that is not below `vocab_size`."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidArgumentError(
                [
                    FieldViolation(
                        f"{path}[{index}]",
                        f"token id {token_id} is outside the vocabulary of {vocab_size} tokens",
                        "TOKEN_OUT_OF_VOCABULARY",
                    )
                ]
            )


def check_fits(prompt: Prompt, prompt_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """Raises InvalidArgumentError when the prompt and what it asks for exceed the model's context, with the lengths."""
    path = prompt_field(prompt)
    room = max_model_len - prompt_tokens
    violations = Violations()
    if prompt_tokens == 0:
        violations.add(path, "the prompt has no token", "PROMPT_EMPTY")
    elif room < 1:
        violations.add(
            path,
            f"the prompt has {prompt_tokens} tokens; the context of {max_model_len} tokens must hold it and at least "
            "one token of output",
            "PROMPT_TOO_LONG",
        )
    elif _or(params.max_tokens, 0) > room:
        violations.add(
            f"{SAMPLING_FIELD}.max_tokens",
            f"{params.max_tokens} tokens do not fit: the context is {max_model_len} tokens and the prompt takes "
            f"{prompt_tokens}, which leaves {room}",
            "MAX_TOKENS_TOO_LARGE",
        )
    elif _or(params.min_tokens, 0) > room:
        violations.add(
            f"{SAMPLING_FIELD}.min_tokens",
            f"{params.min_tokens} tokens do not fit: the prompt of {prompt_tokens} tokens leaves {room} of the context",
            "MIN_TOKENS_TOO_LARGE",
        )
    violations.raise_if_any()
