"""Parts of requests from Python values: pure functions.

A keyword that does not exist and a value of the wrong type raise TypeError here, before anything is sent; a value that
its field cannot hold raises RequestValueError. Which values are right is the server's to say, with every wrong field
at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from bitmill.artifact.v1.recipe_pb2 import Calibration, Recipe, Scheme
from bitmill.errors import RequestValueError
from bitmill.inference.v1.generation_pb2 import ChatMessage, SamplingParams
from bitmill.inference.v1.model_pb2 import EngineOptions
from bitmill.quantizer.v1.quantization_job_pb2 import EvaluationSpec, JobState, QuantizationSpec

M = TypeVar("M", bound=Message)

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversational = str | Iterable[ChatMessage | Mapping[str, str]]
"""One user message as text, or messages: protobuf ones, or {"role": …, "content": …}."""


class RecipeOptions(TypedDict, total=False):
    """How to quantize beside the scheme. Unset takes the server's default; see `Recipe` and `Calibration`."""

    group_size: int
    symmetric: bool
    ignore: Sequence[str]
    dampening_frac: float
    seed: int
    calibration_uri: str | os.PathLike[str]
    num_samples: int
    max_sequence_length: int
    evaluation_tokens: int


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


class EngineKeywords(TypedDict, total=False):
    """Options of the engine: the fields of `EngineOptions`. Unset takes vLLM's default."""

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


def to_uri(location: str | os.PathLike[str]) -> str:
    """Returns a URI as it is and a path as an absolute file:// URI; `~` and links are not followed."""
    if isinstance(location, str) and "://" in location:
        return location
    return Path(os.path.abspath(location)).as_uri()


def scheme_of(scheme: str | int) -> Scheme:
    """Returns the scheme of a name such as "W4A16"; RequestValueError with the known ones for another."""
    return cast(Scheme, _enum_value(Scheme, "SCHEME_", scheme))


def job_states(states: Iterable[str | int]) -> list[JobState]:
    """Returns the states of names such as "RUNNING"; RequestValueError with the known ones for another."""
    return [cast(JobState, _enum_value(JobState, "JOB_STATE_", state)) for state in states]


def quantization_spec(
    source_uri: str | os.PathLike[str], artifact_name: str, scheme: str | int, options: RecipeOptions
) -> QuantizationSpec:
    """Builds what a job makes of what. `options` as in `RecipeOptions`."""
    _check_keywords("quantization option", options, RecipeOptions)
    given: dict[str, Any] = dict(options)
    calibration = _picked(given, {"calibration_uri": "uri", "num_samples": "", "max_sequence_length": ""})
    if "uri" in calibration:
        calibration["uri"] = to_uri(calibration["uri"])
    evaluation = _picked(given, {"evaluation_tokens": "num_tokens"})
    return QuantizationSpec(
        source_uri=to_uri(source_uri) if isinstance(source_uri, os.PathLike) else source_uri,
        artifact_name=artifact_name,
        recipe=filled(Recipe, scheme=scheme_of(scheme), **given),
        calibration=filled(Calibration, **calibration) if calibration else None,
        evaluation=filled(EvaluationSpec, **evaluation) if evaluation else None,
    )


def sampling_params(options: SamplingOptions) -> SamplingParams | None:
    """Builds sampling parameters; None when no option is given."""
    _check_keywords("sampling option", options, SamplingOptions)
    given: dict[str, Any] = dict(options)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return filled(SamplingParams, **given) if given else None


def engine_options(options: EngineKeywords) -> EngineOptions | None:
    """Builds options of the engine; None when no option is given."""
    _check_keywords("engine option", options, EngineKeywords)
    return filled(EngineOptions, **options) if options else None


def chat_messages(messages: Conversational) -> list[ChatMessage]:
    """Returns the messages of a conversation; text alone is one user message."""
    if isinstance(messages, str):
        return [ChatMessage(role="user", content=messages)]
    return [message if isinstance(message, ChatMessage) else ChatMessage(**message) for message in messages]


def filled(kind: type[M], **values: Any) -> M:
    """Builds a message; RequestValueError names the field that cannot hold its value."""
    message = kind()
    for name, value in values.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except ValueError as error:
            raise RequestValueError(f"{name}: {error}") from error
    return message


def _picked(given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Takes the named values out of `given`, under the new name where there is one."""
    return {renamed or name: given.pop(name) for name, renamed in names.items() if name in given}


def _check_keywords(what: str, given: Mapping[str, object], allowed: Any) -> None:
    for name in given:
        if name not in allowed.__annotations__:
            close = difflib.get_close_matches(name, allowed.__annotations__, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(allowed.__annotations__)}"
            raise TypeError(f"unknown {what} {name!r}; {hint}")


def _enum_value(enum: EnumTypeWrapper, prefix: str, value: str | int) -> int:
    known = {name.removeprefix(prefix): number for name, number in enum.items() if number}
    if isinstance(value, str):
        number = known.get(value.upper().removeprefix(prefix))
    else:
        number = value if value in known.values() else None
    if number is None:
        raise RequestValueError(
            f"unknown {prefix.strip('_').lower().replace('_', ' ')} {value!r}; known: {', '.join(known)}"
        )
    return number
