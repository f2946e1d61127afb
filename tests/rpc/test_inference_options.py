"""Where the options of an engine come from: the request, then the artifact's manifest, then the server's settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from bitmill.inference.v1 import model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill_common.artifact import Device
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.engine_options import EngineOptions
from support.inference_artifacts import publish_artifact
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations

DEFAULTS = EngineOptions(max_num_queued_reqs=100, max_num_seqs=8, enforce_eager=True)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with settings of its own."""
    async with serving(tmp_path, defaults=DEFAULTS) as running:
        yield running


def artifact(server: Serving, **options: Any) -> str:
    return publish_artifact(server.root, server.checkpoint, engine_options=options)


async def failure_of(server: Serving, uri: str = "", **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load("tiny", uri, **options)
    assert server.engines.started == []
    return caught.value


async def test_the_request_goes_before_the_manifest_and_that_before_the_settings(server: Serving) -> None:
    """Each option by itself; the model shows those of the request."""
    uri = artifact(server, max_num_seqs=4, max_model_len=32, dtype="float32", hf_overrides={"sliding_window": 8})
    model = await server.load("tiny", uri, max_model_len=16)
    assert server.engine.options == EngineOptions(
        max_model_len=16,
        max_num_seqs=4,
        dtype="float32",
        hf_overrides={"sliding_window": 8},
        max_num_queued_reqs=100,
        enforce_eager=True,
    )
    assert model.engine_options == model_pb2.EngineOptions(max_model_len=16)
    assert (await server.load("tiny", uri, max_model_len=16)) == model


async def test_a_plain_checkpoint_has_the_settings_alone(server: Serving) -> None:
    """Where the request says nothing."""
    await server.load()
    assert server.engine.options == DEFAULTS


async def test_wrong_options_in_a_manifest_are_named(server: Serving) -> None:
    """All of them; the caller did nothing wrong, so it is FAILED_PRECONDITION."""
    uri = artifact(server, max_num_seqs=0, max_batch=3, enforce_eager="yes", hf_overrides={"auto_map": {}})
    failure = await failure_of(server, uri)
    assert (failure.code(), error_info(failure).reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "MANIFEST_OPTIONS_INVALID",
    )
    assert set(error_info(failure).metadata["fields"].split(", ")) == {
        "engine_options.max_num_seqs",
        "engine_options.max_batch",
        "engine_options.enforce_eager",
        "engine_options.hf_overrides.auto_map",
    }


async def test_options_that_contradict_each_other_only_together_are_told(server: Serving) -> None:
    """The request's and the manifest's, each fine by itself."""
    failure = await failure_of(
        server, artifact(server, max_num_seqs=4), min_batch_size=6, batch_timeout=Duration(seconds=1)
    )
    assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OPTIONS_CONFLICT")
    assert error_info(failure).metadata["fields"] == "engine_options.min_batch_size"


async def test_more_gpus_than_there_are_are_told_with_numbers(server: Serving) -> None:
    """Before anything is fetched or started."""
    server.engines.server_device = ServerDevice(Device.CUDA, 90, "H200", count=2)
    failure = await failure_of(server, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DEVICES_MISSING")
    assert error_info(failure).metadata == {
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "2",
        "needed": "4",
        "available": "2",
    }


async def test_numbers_that_json_does_not_have_are_refused_in_overrides(server: Serving) -> None:
    """A Struct can hold them."""
    request = pb.LoadModelRequest(name="tiny", uri=server.checkpoint_uri)
    request.engine_options.hf_overrides.update({"rope": {"factor": float("inf")}})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.models.LoadModel(request, timeout=TIMEOUT_S)
    assert violations(caught.value) == {"engine_options.hf_overrides.rope.factor": "OUT_OF_RANGE"}


@pytest.mark.parametrize("seconds", [-1, 61, 2**62])
async def test_a_batch_timeout_out_of_range_is_refused(seconds: int, server: Serving) -> None:
    """Also one that is no time at all."""
    error = await failure_of(server, min_batch_size=2, batch_timeout=Duration(seconds=seconds))
    assert violations(error) == {"engine_options.batch_timeout": "OUT_OF_RANGE"}


async def test_a_context_without_room_for_a_token_fails_the_load(server: Serving) -> None:
    """No field of LoadModel is wrong by itself, so it is FAILED_PRECONDITION; the engine is stopped."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(max_model_len=1)
    assert (caught.value.code(), error_info(caught.value).reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "WARM_UP_FAILED",
    )
    assert server.engine.stopped


async def test_numbers_in_a_manifest_that_no_engine_counts_to_are_named(server: Serving) -> None:
    """JSON has whole numbers of any size; a manifest those that a Struct holds."""
    failure = await failure_of(server, artifact(server, max_num_seqs=10**300, gpu_memory_utilization=10**300))
    assert error_info(failure).reason == "MANIFEST_OPTIONS_INVALID"
    assert set(error_info(failure).metadata["fields"].split(", ")) == {
        "engine_options.max_num_seqs",
        "engine_options.gpu_memory_utilization",
    }


async def test_a_parser_that_the_engine_does_not_have_is_refused(server: Serving) -> None:
    """Before anything is fetched, with every other fault; in a manifest, it is the artifact that is wrong."""
    error = await failure_of(server, tool_call_parser="smoke-signals", dtype="int8")
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error)["engine_options.tool_call_parser"] == "UNKNOWN_PARSER"
    assert "engine_options.dtype" in violations(error)
    error = await failure_of(server, artifact(server, tool_call_parser="smoke-signals"))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).reason == "MANIFEST_OPTIONS_INVALID"
    assert (await server.load("other", tool_call_parser="hermes")).engine_options.tool_call_parser == "hermes"
