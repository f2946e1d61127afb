"""What a generation is: options of the request, chunks of the answer; and which requests are valid. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.requests.prompts import ChatPrompt, Prompt, check_prompt, prompt_field
from bitmill_inference.requests.sampling import SAMPLING_FIELD, SamplingParams, check_sampling
from bitmill_inference.requests.violations import Violations

OPTIONS_FIELD = "request_options"


@dataclass(frozen=True)
class RequestOptions:
    """How the engine treats a request, beside what it samples; `generation.proto` has the rules.

    `request_id`: the call's id as its caller knows it, for Abort. `caller`: who asks, for the bound on each caller.
    `trace_headers`: traceparent and tracestate of the call.
    """

    adapter: str = ""
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    request_id: str = ""
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
    if isinstance(prompt, ChatPrompt):
        _check_tools_with_sampling(prompt, params, violations)
    violations.raise_if_any()


def _check_tools_with_sampling(prompt: ChatPrompt, params: SamplingParams, violations: Violations) -> None:
    if prompt.forces_tool_call and params.structured_outputs is not None:
        violations.add(
            f"{SAMPLING_FIELD}.structured_outputs",
            "the output cannot have this form and be the call of a tool",
            "FORM_WITH_TOOL_CHOICE",
        )
    if prompt.offered_tools and params.detokenize is False:
        violations.add(f"{SAMPLING_FIELD}.detokenize", "calls of tools are read from the text", "TOOLS_NEED_TEXT")


def require_task(task: str, supported: Sequence[str]) -> None:
    """Raises FailedPreconditionError, naming what the model does, when that is not `task`."""
    if task not in supported:
        tasks = ", ".join(supported)
        raise FailedPreconditionError(
            "TASK_UNSUPPORTED", f"the model does not do {task!r}; it does: {tasks}", {"supported_tasks": tasks}
        )


def check_vocabulary(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError naming the first id that is not below `vocab_size`."""
    violations = Violations()
    _note_unknown_token(path, token_ids, vocab_size, violations)
    violations.raise_if_any()


def check_for_model(params: SamplingParams, options: RequestOptions, vocab_size: int, *, priorities: bool) -> None:
    """Raises InvalidArgumentError naming every field that is wrong for a model.

    Of each list of token ids, the first that is outside the vocabulary.
    """
    violations = Violations()
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        _note_unknown_token(f"{SAMPLING_FIELD}.{name}", getattr(params, name), vocab_size, violations)
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            _note_unknown(f"{SAMPLING_FIELD}.logit_bias[{token_id}]", token_id, vocab_size, violations)
            break
    if options.priority and not priorities:
        description = 'needs a model that was loaded with scheduling_policy "priority"'
        violations.add(f"{OPTIONS_FIELD}.priority", description, "PRIORITY_UNSUPPORTED")
    violations.raise_if_any()


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


def joined(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Returns one chunk for each sequence, by index: what the chunks of a stream make together."""
    sequences: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        sequences.setdefault(chunk.index, []).append(chunk)
    return [_joined(sequences[index]) for index in sorted(sequences)]


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        chunks[0].index,
        "".join(chunk.text for chunk in chunks),
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [position for chunk in chunks for position in chunk.logprobs],
        chunks[-1].finish,
        chunks[-1].usage,
        [position for chunk in chunks for position in chunk.prompt_logprobs],
        "".join(chunk.reasoning for chunk in chunks),
        [delta for chunk in chunks for delta in chunk.tool_calls],
    )


def _note_unknown_token(path: str, token_ids: Sequence[int], vocab_size: int, violations: Violations) -> None:
    # A prompt may have millions of ids: `max` is many times as fast as a loop.
    if max(token_ids, default=0) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        _note_unknown(f"{path}[{index}]", token_ids[index], vocab_size, violations)


def _note_unknown(path: str, token_id: int, vocab_size: int, violations: Violations) -> None:
    description = f"token id {token_id} is outside the vocabulary of {vocab_size} tokens"
    violations.add(path, description, "TOKEN_OUT_OF_VOCABULARY")
