"""The keywords that the clients' calls take: one name for each field of the contract, which has the meanings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict, cast

from bitmill.artifact.v1.recipe_pb2 import AdaptiveSearch, ModuleRule, Recipe
from bitmill.conversation import Tools
from bitmill.inference.v1.generation_pb2 import RepetitionDetection
from bitmill.inference.v1.structured_outputs_pb2 import StructuredOutputs
from bitmill.inference.v1.tool_pb2 import ToolChoice


class CallOptions(TypedDict, total=False):
    """What every call takes."""

    timeout: float | None
    """Deadline in seconds. Unset or None: the client's, else the call's own default. `math.inf`: none."""
    request_id: str
    """Sent as x-request-id, the id under which the server logs the call: printable ASCII. Unset: a new one."""
    caller_id: str
    """Sent as x-caller-id, for whom the call is made: printable ASCII. Unset: the client's."""
    trace_headers: Mapping[str, str]
    """The trace that the call belongs to: traceparent and tracestate, as OpenTelemetry's `inject` writes them."""


class EngineKeywords(TypedDict, total=False):
    """Options of the engine: the fields of `EngineOptions`. Unset takes the artifact's, the server's, then vLLM's."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    distributed_executor_backend: str
    dtype: str
    kv_cache_dtype: str
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    min_batch_size: int
    batch_timeout: timedelta
    scheduling_policy: str
    enable_chunked_prefill: bool
    cpu_offload_gb: float
    kv_offloading_size: float
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    enable_sleep_mode: bool
    tool_call_parser: str
    reasoning_parser: str
    runner: str
    convert: str
    hf_overrides: Mapping[str, Any]


class RecipeOptions(TypedDict, total=False):
    """How to quantize beside the scheme. Unset takes the server's default; see `Recipe` and `Calibration`.

    `recipe` is what the others start from: a shipped recipe's name, a file, or a message; `bitmill.recipes` has them,
    and makes rules and searches. Enums go by their names without prefix. `engine` is the quantization engine;
    `engine_options` say how to serve the artifact, and go into its manifest.
    """

    recipe: str | os.PathLike[str] | Recipe
    algorithm: str | int
    group_size: int
    symmetric: bool
    ignore: Sequence[str]
    rules: Sequence[ModuleRule]
    activation_order: str | int
    kv_cache: str | int
    smoothing_strength: float
    adaptive: AdaptiveSearch
    dampening_frac: float
    seed: int
    calibration_uri: str | os.PathLike[str]
    num_samples: int
    max_sequence_length: int
    packing: str | int
    evaluation_tokens: int
    engine: str
    engine_options: EngineKeywords


class SamplingOptions(TypedDict, total=False):
    """How to sample: the fields of `SamplingParams`. Unset takes the model's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    logprobs: int
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    n: int
    logit_bias: Mapping[int, float]
    prompt_logprobs: int
    truncate_prompt_tokens: int
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    logprob_token_ids: Sequence[int]
    structured_outputs: StructuredOutputs
    """`bitmill.structured` makes it."""
    thinking_token_budget: int
    spaces_between_special_tokens: bool
    detokenize: bool
    stream_interval: int
    repetition_detection: RepetitionDetection


class EngineRequestOptions(TypedDict, total=False):
    """How the engine treats a request: the fields of `RequestOptions`."""

    adapter: str
    priority: int
    cache_salt: str
    session_id: str


class GenerationOptions(SamplingOptions, EngineRequestOptions, CallOptions, total=False):
    """What every call takes that generates."""


class ConversationOptions(TypedDict, total=False):
    """What a conversation has beside its messages."""

    tools: Tools
    """Functions that the model may call. Needs a model that was loaded with a tool_call_parser."""
    tool_choice: str | ToolChoice
    """The mode "auto", "none", "required", or else the name of the tool to call."""
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    """Values for the model's template, such as {"enable_thinking": False}."""
    continue_final_message: bool


class ChatOptions(ConversationOptions, GenerationOptions, total=False):
    """What every call takes that goes on with a conversation."""


class PoolingOptions(EngineRequestOptions, CallOptions, total=False):
    """What every call takes that embeds or scores."""


class LoadOptions(EngineKeywords, CallOptions, total=False):
    """What the loading of a model takes."""


class QuantizationOptions(RecipeOptions, CallOptions, total=False):
    """What a quantization takes."""


def taken(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that `kind`, one of the classes above, names; those that are None are left out."""
    return {name: value for name, value in options.items() if name in kind.__annotations__ and value is not None}


def call_options(kind: Any, options: Mapping[str, Any]) -> CallOptions:
    """Returns what every call takes of the options of `kind`; TypeError for one that `kind` does not name."""
    check(kind, options)
    return cast(CallOptions, taken(CallOptions, options))


def check(kind: Any, options: Mapping[str, object]) -> None:
    """Raises TypeError for an option that `kind` does not name, with the one that was meant."""
    for name in options:
        if name not in kind.__annotations__:
            close = difflib.get_close_matches(name, kind.__annotations__, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(kind.__annotations__)}"
            raise TypeError(f"unknown option {name!r}; {hint}")
