"""What a generation is: options of the request, chunks of the answer; and which requests are valid. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.prompts import Prompt, check_prompt, prompt_field
from bitmill_inference.sampling import SAMPLING_FIELD, SamplingParams, check_sampling
from bitmill_inference.violations import Violations


@dataclass(frozen=True)
class RequestOptions:
    """How the engine treats a request, beside what it samples; `generation.proto` has the rules.

    `caller`: who asks, for the bound on each caller. `trace_headers`: traceparent and tracestate of the call.
    """

    adapter: str = ""
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    caller: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict)


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TOOL_CALLS = "tool_calls"
    REPETITION = "repetition"


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
    reasoning_tokens: int = 0


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


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new in the call of a tool. `id` and `name` are set in the call's first delta."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(slots=True)
class Chunk:
    """What is new in one sequence. `finish` is set in the sequence's last chunk, `usage` in the call's last.

    `prompt_logprobs` is set in the call's first chunk when they were asked for. `reasoning` and `tool_calls` come from
    the model's parsers.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


def validate(prompt: Prompt, params: SamplingParams) -> None:
    """Raises InvalidArgumentError naming every field that is wrong whatever the model is."""
    violations = Violations()
    check_prompt(prompt, violations)
    check_sampling(params, violations)
    violations.raise_if_any()


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
    elif (params.max_tokens or 0) > room:
        violations.add(
            f"{SAMPLING_FIELD}.max_tokens",
            f"{params.max_tokens} tokens do not fit: the context is {max_model_len} tokens and the prompt takes "
            f"{prompt_tokens}, which leaves {room}",
            "MAX_TOKENS_TOO_LARGE",
        )
    elif (params.min_tokens or 0) > room:
        violations.add(
            f"{SAMPLING_FIELD}.min_tokens",
            f"{params.min_tokens} tokens do not fit: the prompt of {prompt_tokens} tokens leaves {room} of the context",
            "MIN_TOKENS_TOO_LARGE",
        )
    violations.raise_if_any()
