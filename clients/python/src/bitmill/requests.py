"""Parts of requests from Python values: pure functions.

A keyword that does not exist and a value of the wrong type raise TypeError here, before anything is sent; a value that
its field cannot hold raises RequestValueError. Which values are right is the server's to say, with every wrong field
at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.struct_pb2 import Struct

from bitmill import recipes
from bitmill.artifact.v1.recipe_pb2 import (
    ActivationOrder,
    Algorithm,
    Calibration,
    KvCacheScheme,
    Packing,
    Recipe,
    Scheme,
)
from bitmill.errors import RequestValueError
from bitmill.filling import filled
from bitmill.inference.v1.generation_pb2 import RequestOptions, SamplingParams, TokenIds
from bitmill.inference.v1.inference_service_pb2 import PoolingInput
from bitmill.inference.v1.model_pb2 import EngineOptions
from bitmill.keywords import EngineKeywords, EngineRequestOptions, RecipeOptions, SamplingOptions, check, taken
from bitmill.quantizer.v1.quantization_job_pb2 import EvaluationSpec, JobState, QuantizationSpec
from bitmill.recipes import enum_value

Prompt = str | Sequence[int]
"""Text, or token ids."""

DEFAULT_SCHEME = "W4A16"
"""What is made when neither a scheme nor a recipe is given."""

_RECIPE_ENUMS: dict[str, tuple[EnumTypeWrapper, str]] = {
    "algorithm": (Algorithm, "ALGORITHM_"),
    "activation_order": (ActivationOrder, "ACTIVATION_ORDER_"),
    "kv_cache": (KvCacheScheme, "KV_CACHE_SCHEME_"),
}


def to_uri(location: str | os.PathLike[str]) -> str:
    """Returns a URI as it is and a path as an absolute file:// URI; `~` and links are not followed."""
    if isinstance(location, str) and "://" in location:
        return location
    return Path(os.path.abspath(location)).as_uri()


def path_uri(location: str | os.PathLike[str]) -> str:
    """Returns a path object as a file:// URI and text as it is: the server says what is wrong with it."""
    return to_uri(location) if isinstance(location, os.PathLike) else location


def texts(given: str | Iterable[str]) -> list[str]:
    """Returns texts as a list; text alone is one."""
    return [given] if isinstance(given, str) else list(given)


def scheme_of(scheme: str | int) -> Scheme:
    """Returns the scheme of a name such as "W4A16"; RequestValueError with the known ones for another."""
    return cast(Scheme, enum_value(Scheme, "SCHEME_", scheme))


def job_states(states: Iterable[str | int]) -> list[JobState]:
    """Returns the states of names such as "RUNNING"; RequestValueError with the known ones for another."""
    return [cast(JobState, enum_value(JobState, "JOB_STATE_", state)) for state in states]


def quantization_spec(
    source_uri: str | os.PathLike[str], artifact_name: str, scheme: str | int | None, options: Mapping[str, Any]
) -> QuantizationSpec:
    """Builds what a job makes of what, of those options that `RecipeOptions` names."""
    given = taken(RecipeOptions, options)
    picked = {"calibration_uri": "uri", "num_samples": "", "max_sequence_length": "", "packing": ""}
    calibration = _picked(given, picked)
    if "uri" in calibration:
        calibration["uri"] = to_uri(calibration["uri"])
    if "packing" in calibration:
        calibration["packing"] = enum_value(Packing, "PACKING_", calibration["packing"])
    evaluation = _picked(given, {"evaluation_tokens": "num_tokens"})
    served = given.pop("engine_options", None)
    engine = given.pop("engine", None)
    return filled(
        QuantizationSpec,
        source_uri=path_uri(source_uri),
        artifact_name=artifact_name,
        recipe=_recipe(scheme, given),
        calibration=filled(Calibration, **calibration) if calibration else None,
        evaluation=filled(EvaluationSpec, **evaluation) if evaluation else None,
        engine_options=None if served is None else _manifest_options(served),
        engine=engine,
    )


def _recipe(scheme: str | int | None, given: dict[str, Any]) -> Recipe:
    """Returns the recipe that is started from, with what is given in place of its own."""
    base = given.pop("recipe", None)
    recipe = Recipe()
    if isinstance(base, Recipe):
        recipe.CopyFrom(base)
    elif base is not None:
        recipe.CopyFrom(recipes.load(base))
    if scheme is not None or base is None:
        given["scheme"] = scheme_of(DEFAULT_SCHEME if scheme is None else scheme)
    for name, (enum, prefix) in _RECIPE_ENUMS.items():
        if name in given:
            given[name] = enum_value(enum, prefix, given[name])
    for name in given:
        recipe.ClearField(name)
    recipe.MergeFrom(filled(Recipe, **given))
    return recipe


def prompt_field(prompt: Prompt) -> dict[str, Any]:
    """Returns the field of a request, or of a `PoolingInput`, that holds a prompt."""
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": filled(TokenIds, ids=prompt)}


def pooling_inputs(inputs: str | Iterable[Prompt]) -> list[PoolingInput]:
    """Returns what is to be embedded; text alone is one input."""
    return [
        filled(PoolingInput, **prompt_field(prompt)) for prompt in ([inputs] if isinstance(inputs, str) else inputs)
    ]


def sampling_params(options: Mapping[str, Any]) -> SamplingParams | None:
    """Builds sampling parameters of those options that `SamplingOptions` names; None when there is none."""
    given = taken(SamplingOptions, options)
    if "stop" in given:
        given["stop"] = texts(given["stop"])
    return filled(SamplingParams, **given) if given else None


def request_options(options: Mapping[str, Any]) -> RequestOptions | None:
    """Builds request options of those that `EngineRequestOptions` names; None when there is none."""
    given = taken(EngineRequestOptions, options)
    return filled(RequestOptions, **given) if given else None


def engine_options(options: Mapping[str, Any]) -> EngineOptions | None:
    """Builds options of the engine of those that `EngineKeywords` names; None when there is none."""
    given = taken(EngineKeywords, options)
    if "hf_overrides" in given:
        given["hf_overrides"] = struct("hf_overrides", given["hf_overrides"])
    return filled(EngineOptions, **given) if given else None


def struct(name: str, values: Mapping[str, Any] | None) -> Struct | None:
    """Returns a mapping as a protobuf Struct; RequestValueError naming it for what JSON cannot hold."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} is a mapping, not {values!r}")
    message = Struct()
    try:
        message.update(values)
    except (TypeError, ValueError) as error:
        raise RequestValueError(f"{name}: {error}") from error
    return message


def _manifest_options(options: Mapping[str, Any]) -> Struct | None:
    """Returns options of the engine as a manifest has them: plain values, times in seconds."""
    check(EngineKeywords, options)
    seconds = {name: value.total_seconds() for name, value in options.items() if isinstance(value, timedelta)}
    return struct("engine_options", {**options, **seconds})


def _picked(given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Takes the named values out of `given`, under the new name where there is one."""
    return {renamed or name: given.pop(name) for name, renamed in names.items() if name in given}
