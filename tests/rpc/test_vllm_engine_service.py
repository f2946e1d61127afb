"""vLLM's own gRPC contract on a bitmill server, with a servicer in smg's place and a fake engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from bitmill.inference.v1 import model_pb2, model_service_pb2
from bitmill_inference.ports import Engine
from bitmill_inference.servicers.smg_servicer import VLLM_ENGINE, VllmEngineService
from support.inference_serving import Serving, error_info, serving

MODEL = "tiny"


class SaidServicer(pb_grpc.VllmEngineServicer):
    """Answers with the number of its engine; `gate`, while clear, holds a stream after its first response."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = asyncio.Event()

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(vocab_size=self.number)

    async def FlushCache(self, request: Any, context: Any) -> common_pb2.FlushCacheResponse:  # noqa: N802
        return common_pb2.FlushCacheResponse(message="flushed")

    async def Embed(self, request: Any, context: Any) -> pb.EmbedResponse:  # noqa: N802
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not an embedding model")
        raise AssertionError("abort raises")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        try:
            yield pb.GenerateResponse(chunk={"token_ids": [self.number]})
            await self.gate.wait()
            yield pb.GenerateResponse(complete={"output_ids": [self.number], "finish_reason": "length"})
        finally:
            self.closed.set()


class Served:
    """A server with the service, and a stub on it. `servicers` are those made so far."""

    def __init__(self, running: Serving, servicers: list[SaidServicer]) -> None:
        self.running = running
        self.servicers = servicers
        self.stub = pb_grpc.VllmEngineStub(running.channel)

    async def engine_number(self) -> int:
        return int((await self.stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    servicers: list[SaidServicer] = []

    def new_servicer(engine: Engine, model: str) -> SaidServicer:
        servicers.append(SaidServicer(len(servicers) + 1))
        return servicers[-1]

    def mount(models: Any) -> Any:
        return (VllmEngineService(models, MODEL, new_servicer).binding,)

    async with serving(tmp_path, further=mount, services={MODEL: VLLM_ENGINE.full_name}) as running:
        yield Served(running, servicers)


async def test_it_is_absent_unless_a_model_is_named(tmp_path: Path) -> None:
    """A server without the setting does not know the service."""
    async with serving(tmp_path) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.VllmEngineStub(running.channel).GetModelInfo(pb.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_unary_and_streaming_calls_reach_the_models_servicer(served: Served) -> None:
    """One servicer for each engine, whatever the number of calls."""
    await served.running.load(MODEL)
    assert await served.engine_number() == 1
    responses = [response async for response in served.stub.Generate(pb.GenerateRequest())]
    assert [list(responses[0].chunk.token_ids), list(responses[1].complete.output_ids)] == [[1], [1]]
    assert len(served.servicers) == 1


async def test_messages_of_other_packages_are_mounted_too(served: Served) -> None:
    """Some methods of the contract take messages that it shares with other engines' contracts."""
    await served.running.load(MODEL)
    assert (await served.stub.FlushCache(common_pb2.FlushCacheRequest())).message == "flushed"


async def test_a_status_of_the_servicers_own_passes(served: Served) -> None:
    """smg's servicer ends its calls itself; the call's log line has that status."""
    await served.running.load(MODEL)
    with structlog.testing.capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Embed(pb.EmbedRequest())
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "not an embedding model",
    )
    (line,) = [line for line in lines if line["event"].startswith("call_")]
    assert (line["event"], line["code"]) == ("call_finished", "INVALID_ARGUMENT")


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_model_that_is_not_there_or_not_yet_is_said_so(served: Served, kind: str) -> None:
    """UNAVAILABLE, so that a router tries another worker."""

    async def call() -> grpc.aio.AioRpcError:
        health_check, generate = served.stub.HealthCheck, served.stub.Generate
        call = health_check(pb.HealthCheckRequest()) if kind == "unary" else generate(pb.GenerateRequest()).read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value

    error = await call()
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_LOADED")
    served.running.engines.gate.clear()
    loading = asyncio.create_task(served.running.load(MODEL))
    await asyncio.wait_for(served.running.engines.starting.wait(), 20)
    error = await call()
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
    served.running.engines.gate.set()
    await loading


async def test_its_health_is_the_models(served: Served) -> None:
    """A probe of the service's name must not find a server that has no model for it."""

    async def is_serving() -> bool:
        answer = await served.running.health.Check(health_pb2.HealthCheckRequest(service=VLLM_ENGINE.full_name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    assert not await is_serving()
    await served.running.load(MODEL)
    assert await is_serving()
    await served.running.unload(MODEL)
    assert not await is_serving()


async def test_an_unload_waits_for_a_stream(served: Served) -> None:
    """A call holds the model as a call of bitmill's own does."""
    await served.running.load(MODEL)
    await served.engine_number()
    (servicer,) = served.servicers
    servicer.gate.clear()
    call = served.stub.Generate(pb.GenerateRequest())
    assert (await call.read()).chunk.token_ids == [1]
    unloading = asyncio.create_task(served.running.unload(MODEL))
    changes = served.running.models.WatchModel(model_service_pb2.WatchModelRequest(name=MODEL))
    async for change in changes:
        if change.model.state == model_pb2.MODEL_STATE_DRAINING:
            break
    assert not served.running.engine.stopped
    servicer.gate.set()
    assert (await call.read()).complete.finish_reason == "length"
    await asyncio.wait_for(unloading, 20)
    assert served.running.engine.stopped


async def test_a_caller_that_leaves_ends_the_servicers_stream(served: Served) -> None:
    """At once, and the model is free to be unloaded."""
    await served.running.load(MODEL)
    await served.engine_number()
    (servicer,) = served.servicers
    servicer.gate.clear()
    call = served.stub.Generate(pb.GenerateRequest())
    await call.read()
    call.cancel()
    await asyncio.wait_for(servicer.closed.wait(), 20)
    await asyncio.wait_for(served.running.unload(MODEL), 20)


async def test_a_model_loaded_again_has_a_servicer_of_its_own(served: Served) -> None:
    """The servicer of an engine that is gone is not used, nor kept."""
    for number in (1, 2):
        await served.running.load(MODEL)
        assert await served.engine_number() == number
        await served.running.unload(MODEL)
