"""Requests from Python values, the method table, and the places where both meet the contract."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitmill import (
    QuantizerClient,
    aio,
    client,
    inference_calls,
    keywords,
    methods,
    model_calls,
    quantizer_calls,
    requests,
    structured,
)
from bitmill.artifact.v1.recipe_pb2 import Calibration, Recipe, Scheme
from bitmill.errors import RequestValueError
from bitmill.inference.v1.generation_pb2 import RequestOptions, SamplingParams
from bitmill.inference.v1.inference_service_pb2 import ChatRequest
from bitmill.inference.v1.model_pb2 import EngineOptions
from bitmill.quantizer.v1.quantization_job_pb2 import JobState


def fields(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_every_field_of_the_contract_has_its_keyword() -> None:
    assert set(keywords.SamplingOptions.__annotations__) == fields(SamplingParams)
    assert set(keywords.EngineRequestOptions.__annotations__) == fields(RequestOptions)
    assert set(keywords.EngineKeywords.__annotations__) == fields(EngineOptions)
    recipe_options = set(keywords.RecipeOptions.__annotations__)
    told = {"model", "messages", "sampling_params", "request_options"}
    assert set(keywords.ConversationOptions.__annotations__) == fields(ChatRequest) - told
    assert recipe_options == (fields(Recipe) - {"scheme"}) | (fields(Calibration) - {"uri"}) | {
        "calibration_uri",
        "recipe",
        "evaluation_tokens",
        "engine",
        "engine_options",
    }


def test_the_method_table_is_the_contract() -> None:
    """Every call of every service once."""
    services = {method.service for method in methods.METHODS}
    assert {(method.service.full_name, method.name) for method in methods.METHODS} == {
        (service.full_name, method.name) for service in services for method in service.methods
    }
    assert len(services) == 4
    assert len(methods.METHODS) == len({method.path for method in methods.METHODS})
    for method in methods.METHODS:
        assert method.response.DESCRIPTOR is method.service.methods_by_name[method.name].output_type


def test_only_calls_that_may_be_sent_again_are_in_the_service_config() -> None:
    config = json.loads(methods.service_config())
    retried = {entry["method"] for entry in config["methodConfig"][0]["name"]}
    assert "CreateQuantizationJob" in retried
    assert not retried & {"Generate", "GenerateUnary", "Chat", "ChatUnary", "Embed", "Score"}
    assert not retried & {"UnloadModel", "DeleteAlias", "UnloadAdapter"}


@pytest.mark.parametrize(
    ("sync_kind", "async_kind", "calls"),
    [
        (client.QuantizerClient, aio.AsyncQuantizerClient, quantizer_calls),
        (client.InferenceClient, aio.AsyncInferenceClient, inference_calls),
        (client.InferenceClient, aio.AsyncInferenceClient, model_calls),
    ],
)
def test_both_clients_have_the_same_documented_methods(sync_kind: type, async_kind: type, calls: Any) -> None:
    def public(kind: type) -> dict[str, inspect.Signature]:
        return {n: inspect.signature(f) for n, f in inspect.getmembers(kind, callable) if not n.startswith("_")}

    ours, theirs = public(sync_kind), public(async_kind)
    assert {name: s.parameters.keys() for name, s in ours.items()} == {
        n: s.parameters.keys() for n, s in theirs.items()
    }
    for name, function in inspect.getmembers(calls, inspect.isfunction):
        if function.__module__ == calls.__name__ and not name.startswith("_"):
            assert getattr(sync_kind, name).__doc__ == function.__doc__


@pytest.mark.parametrize("given", ["W4A16", "w4a16", "SCHEME_W4A16", Scheme.SCHEME_W4A16])
def test_a_scheme_is_a_name_or_a_number(given: str | int) -> None:
    assert requests.scheme_of(given) == Scheme.SCHEME_W4A16


@pytest.mark.parametrize("given", ["W3A16", "", "UNSPECIFIED", 0, 99])
def test_an_unknown_scheme_names_the_known_ones(given: str | int) -> None:
    with pytest.raises(RequestValueError, match=r"unknown scheme .*W4A16, W8A16, W8A8_INT8"):
        requests.scheme_of(given)


def test_job_states_by_name() -> None:
    assert requests.job_states(["queued", "JOB_STATE_FAILED"]) == [JobState.JOB_STATE_QUEUED, JobState.JOB_STATE_FAILED]
    with pytest.raises(RequestValueError, match="unknown job state 'DONE'"):
        requests.job_states(["DONE"])


def test_an_unknown_keyword_says_what_was_meant_or_lists_the_known_ones() -> None:
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        keywords.check(keywords.GenerationOptions, {"max_token": 1})
    with pytest.raises(TypeError, match="known: timeout, request_id, caller_id, trace_headers"):
        keywords.check(keywords.CallOptions, {"zzz": 1})


def test_a_value_that_its_field_cannot_hold_names_the_field() -> None:
    with pytest.raises(RequestValueError, match="max_tokens"):
        requests.sampling_params({"max_tokens": -1})
    with pytest.raises(TypeError):
        requests.sampling_params({"temperature": "hot"})


@pytest.mark.parametrize(
    "build",
    [
        lambda text: inference_calls.generate(text),
        lambda text: inference_calls.generate_unary("a", model=text),
        lambda text: inference_calls.generate("a", stop=text),
        lambda text: inference_calls.generate("a", cache_salt=text),
        lambda text: inference_calls.generate("a", structured_outputs=structured.regex(text)),
        lambda text: inference_calls.generate("a", structured_outputs=structured.choice("a", text)),
        lambda text: inference_calls.generate("a", structured_outputs=structured.json_schema({"title": text})),
        lambda text: inference_calls.chat(text),
        lambda text: inference_calls.chat_unary([{"role": "user", "content": text}]),
        lambda text: inference_calls.chat("a", tools=[{"name": text}]),
        lambda text: inference_calls.chat("a", tools=[{"name": "a", "parameters": {"title": text}}]),
        lambda text: inference_calls.chat("a", tool_choice=text),
        lambda text: inference_calls.chat("a", chat_template_kwargs={"a": text}),
        lambda text: inference_calls.embed(text),
        lambda text: inference_calls.score(text, ["a"]),
        lambda text: inference_calls.score("a", text),
        lambda text: inference_calls.tokenize(text),
        lambda text: inference_calls.tokenize([{"role": "user", "content": text}]),
        lambda text: inference_calls.abort(text),
        lambda text: model_calls.load_model("file:///a", name=text),
        lambda text: model_calls.load_model(text),
        lambda text: model_calls.set_alias(text, "a"),
        lambda text: model_calls.unload_model(text),
        lambda text: quantizer_calls.job(text),
        lambda text: quantizer_calls.quantize("file:///a", text),
        lambda text: quantizer_calls.artifact(text),
    ],
)
def test_half_a_character_is_refused_before_anything_is_sent(build: Callable[[str], object]) -> None:
    """Python reads one out of a file name or an argument that is not UTF-8."""
    with pytest.raises(RequestValueError, match="surrogates not allowed"):
        build("\udcff")


def test_a_stop_string_alone_is_a_list_of_one() -> None:
    assert requests.sampling_params({"stop": "###"}) == SamplingParams(stop=["###"])
    assert requests.sampling_params({}) is None


def test_zero_and_false_are_sent() -> None:
    params = requests.sampling_params({"temperature": 0, "ignore_eos": False, "seed": 0})
    assert params is not None
    assert all(params.HasField(name) for name in ("temperature", "ignore_eos", "seed"))


@pytest.mark.parametrize("address", ["", "127.0.0.1:0", "127.0.0.1:65536", "localhost:99999"])
def test_an_address_that_gRPC_would_take_for_another_is_refused(address: str) -> None:  # noqa: N802
    """gRPC connects to port 99999 modulo 65536."""
    with pytest.raises(RequestValueError, match="host:port"):
        QuantizerClient(address)


@pytest.mark.parametrize(
    ("build", "wrong"),
    [
        (requests.sampling_params, {"logit_bias": {-1: 0.5}}),
        (requests.sampling_params, {"stop_token_ids": [2**32]}),
        (requests.request_options, {"priority": 2**31}),
        (requests.engine_options, {"hf_overrides": {"a": object()}}),
        (requests.engine_options, {"max_num_seqs": -1}),
    ],
)
def test_every_value_that_cannot_be_sent_is_named(build: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestValueError, match=next(iter(wrong))):
        build(wrong)


def test_an_option_that_is_none_is_not_given() -> None:
    assert requests.sampling_params({"temperature": None, "stop": None}) is None
    assert requests.request_options({"adapter": None}) is None


def test_a_path_becomes_a_file_uri_and_a_uri_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = Path(os.getcwd())
    assert requests.to_uri("./my model") == f"{here.as_uri()}/my%20model"
    assert requests.to_uri(Path("m")) == f"{here.as_uri()}/m"
    assert requests.to_uri("s3://bucket/a b") == "s3://bucket/a b"
    assert requests.to_uri("file:///x/../y") == "file:///x/../y"
