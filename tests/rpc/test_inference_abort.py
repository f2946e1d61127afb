"""Abort over a socket, with a fake engine behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_inference.requests.calls import MAX_ABORTED_IDS
from support.fake_inference_engine import TEXT
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations

PROMPT = "hello"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with one model, whose engine stops after the first token of each request."""
    async with serving(tmp_path) as server:
        await server.load()
        server.engine.gate.clear()
        yield server


def stream(server: Serving, request_id: str, n: int = 1) -> grpc.aio.UnaryStreamCall:
    sampling = generation_pb2.SamplingParams(n=n)
    metadata = (("x-request-id", request_id),)
    return server.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=sampling), metadata=metadata)


def unary(server: Serving, request_id: str) -> grpc.aio.UnaryUnaryCall:
    metadata = (("x-request-id", request_id),)
    return server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT), metadata=metadata)


async def abort(server: Serving, *request_ids: str) -> int:
    request = pb.AbortRequest(request_ids=request_ids)
    return (await server.inference.Abort(request, timeout=TIMEOUT_S)).aborted_calls


async def running(server: Serving, count: int) -> None:
    """Waits until the engine has that many requests."""
    await asyncio.wait_for(server.engine.wait_running(count), TIMEOUT_S)


async def test_an_aborted_stream_ends_ok_with_what_it_has(server: Serving) -> None:
    """Every sequence ends with FINISH_REASON_ABORT, and the usage counts what was said."""
    call = stream(server, "mine", n=2)
    responses = aiter(call)
    chunks = [await anext(responses), await anext(responses)]
    assert await abort(server, "mine") == 1
    chunks.extend([chunk async for chunk in responses])
    assert await call.code() == grpc.StatusCode.OK
    ends = [chunk for chunk in chunks if chunk.HasField("finish")]
    assert {chunk.index: chunk.finish.reason for chunk in ends} == dict.fromkeys(
        (0, 1), generation_pb2.FINISH_REASON_ABORT
    )
    assert "".join(chunk.text for chunk in chunks) == TEXT[0] * 2
    assert chunks[-1].usage.completion_tokens == 2
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)


async def test_an_aborted_unary_call_ends_ok_with_what_it_has(server: Serving) -> None:
    """As a stream does."""
    call = unary(server, "mine")
    await running(server, 1)
    assert await abort(server, "mine") == 1
    answer = await call
    (sequence,) = answer.sequences
    assert (sequence.text, sequence.finish.reason) == (TEXT[0], generation_pb2.FINISH_REASON_ABORT)
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_that_has_not_begun_ends_cancelled(streamed: bool, server: Serving) -> None:
    """REQUEST_ABORTED tells it from a call that its caller cancelled."""
    server.engine.first_gate.clear()
    call = stream(server, "mine") if streamed else unary(server, "mine")
    await running(server, 1)
    assert await abort(server, "mine") == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if streamed else call)
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert error_info(caught.value).reason == "REQUEST_ABORTED"
    await running(server, 0)


async def test_a_call_that_waits_for_a_window_ends_cancelled(tmp_path: Path) -> None:
    """No engine knows of it yet."""
    async with serving(tmp_path) as server:
        await server.load(min_batch_size=2, batch_timeout={"seconds": 60})
        call = unary(server, "mine")
        while not await abort(server, "mine"):
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert error_info(caught.value).reason == "REQUEST_ABORTED"
        assert not [request for request in server.engine.requests if request.options.request_id == "mine"]


async def test_an_aborted_embedding_ends_cancelled(tmp_path: Path) -> None:
    """It has no part of an answer."""
    async with serving(tmp_path) as server:
        server.engines.supported_tasks = ("embed",)
        await server.load()
        server.engine.first_gate.clear()
        request = pb.EmbedRequest(inputs=[pb.PoolingInput(text=PROMPT)])
        call = server.inference.Embed(request, metadata=(("x-request-id", "mine"),))
        await running(server, 1)
        assert await abort(server, "mine") == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert error_info(caught.value).reason == "REQUEST_ABORTED"
        await running(server, 0)


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_an_aborted_tokenization_ends_cancelled(method: str, server: Serving) -> None:
    """It may wait for others' long texts."""
    server.engine.tokenize_gate.clear()
    request = {"Tokenize": pb.TokenizeRequest(text=PROMPT), "Detokenize": pb.DetokenizeRequest(token_ids=[65])}[method]
    call = getattr(server.inference, method)(request, metadata=(("x-request-id", "mine"),))
    while not await abort(server, "mine"):
        pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert error_info(caught.value).reason == "REQUEST_ABORTED"


async def test_every_call_with_the_id_ends_and_no_other(server: Serving) -> None:
    """The same id twice at once harms neither, and Abort means both."""
    calls = [stream(server, request_id) for request_id in ("mine", "mine", "other")]
    mine, too, other = map(aiter, calls)
    for responses in (mine, too, other):
        await anext(responses)
    assert await abort(server, "mine", "unknown", "mine") == 2
    for responses in (mine, too):
        assert [chunk.finish.reason async for chunk in responses] == [generation_pb2.FINISH_REASON_ABORT]
    await running(server, 1)
    server.engine.gate.set()
    assert TEXT[0] + "".join([chunk.text async for chunk in other]) == TEXT


async def test_an_id_that_no_call_has_is_no_error(server: Serving) -> None:
    """Nor is one of a call that has ended."""
    server.engine.gate.set()
    assert await unary(server, "mine")
    assert await abort(server, "mine", "unknown") == 0


async def test_a_long_id_is_known_by_what_the_server_keeps_of_it(server: Serving) -> None:
    """The caller may name it as it sent it."""
    call = stream(server, "x" * 200)
    responses = aiter(call)
    assert (await anext(responses)).request_id == "x" * 128
    assert await abort(server, "x" * 200) == 1
    assert [chunk.finish.reason async for chunk in responses] == [generation_pb2.FINISH_REASON_ABORT]


async def test_abort_without_an_id_is_refused(server: Serving) -> None:
    """It would mean nothing, or everything."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort(server)
    assert violations(caught.value) == {"request_ids": "REQUEST_ID_MISSING"}


async def test_abort_names_so_many_calls_at_most(server: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort(server, *["mine"] * (MAX_ABORTED_IDS + 1))
    assert violations(caught.value) == {"request_ids": "TOO_MANY"}
