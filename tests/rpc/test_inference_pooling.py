"""Embed and Score over a socket, with a fake engine behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common.errors import FieldViolation, InvalidArgumentError, UnavailableError
from bitmill_inference.requests.pooling import EmbedParams, ScoreParams
from bitmill_inference.requests.prompts import TextPrompt, TokensPrompt
from support.fake_inference_engine import DIMENSIONS
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations

TEXT = pb.PoolingInput(text="hello")
EMBED = pb.EmbedRequest(inputs=[TEXT])
SCORE = pb.ScoreRequest(query="hello", documents=["hello", "world"])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with one model, "tiny", which embeds and scores."""
    async with serving(tmp_path) as running:
        running.engines.supported_tasks = ("embed", "score")
        await running.load()
        yield running


def calls(server: Serving) -> list[Callable[[], Awaitable[object]]]:
    return [lambda: server.inference.Embed(EMBED), lambda: server.inference.Score(SCORE)]


async def error_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_vectors_come_in_order_with_the_token_counts(server: Serving) -> None:
    """Text and token ids mixed; the counts are of all inputs; the id is the caller's own."""
    ids = generation_pb2.TokenIds(ids=[1, 2, 3])
    request = pb.EmbedRequest(inputs=[TEXT, pb.PoolingInput(token_ids=ids), TEXT], normalize=False)
    response = await server.inference.Embed(request, metadata=[("x-request-id", "mine")])
    first, second, third = ([*embedding.values] for embedding in response.embeddings)
    assert len(first) == DIMENSIONS
    assert first == third != second
    assert sum(second) == 3
    assert response.usage == generation_pb2.Usage(prompt_tokens=6 + 3 + 6)
    assert response.request_id == "mine"


async def test_scores_come_in_order_with_the_token_counts(server: Serving) -> None:
    """One for each document, whose order is not changed."""
    response = await server.inference.Score(SCORE)
    first, second = response.scores
    assert first == 1 > second
    assert response.usage.prompt_tokens


async def test_unset_parameters_stay_unset(server: Serving) -> None:
    """The engine tells them from zeros and false; the options of the request are passed on."""
    await server.inference.Embed(EMBED)
    options = generation_pb2.RequestOptions(cache_salt="salt")
    await server.inference.Embed(
        pb.EmbedRequest(
            inputs=[TEXT, pb.PoolingInput(token_ids=generation_pb2.TokenIds(ids=[7]))],
            dimensions=2,
            normalize=False,
            truncate_prompt_tokens=3,
            request_options=options,
        )
    )
    await server.inference.Score(SCORE)
    await server.inference.Score(pb.ScoreRequest(query="q", documents=["d"], truncate_prompt_tokens=3))
    plain, chosen, score, cut = server.engine.poolings[-4:]
    assert plain.params == EmbedParams()
    assert chosen.params == EmbedParams(dimensions=2, normalize=False, truncate_prompt_tokens=3)
    assert chosen.inputs == (TextPrompt("hello"), TokensPrompt((7,)))
    assert chosen.options.cache_salt == "salt"
    assert (score.params, cut.params) == (ScoreParams(), ScoreParams(truncate_prompt_tokens=3))


async def test_everything_wrong_is_named_at_once(server: Serving) -> None:
    """Each input by its place and kind; nothing reaches the engine."""
    seen = len(server.engine.poolings)
    empty = [TEXT, pb.PoolingInput(), pb.PoolingInput(text=""), pb.PoolingInput(token_ids=generation_pb2.TokenIds())]
    error = await error_of(server.inference.Embed(pb.EmbedRequest(inputs=empty, dimensions=0)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {
        "inputs[1]": "PROMPT_EMPTY",
        "inputs[2].text": "PROMPT_EMPTY",
        "inputs[3].token_ids.ids": "PROMPT_EMPTY",
        "dimensions": "OUT_OF_RANGE",
    }
    error = await error_of(server.inference.Score(pb.ScoreRequest(documents=["", "d"], truncate_prompt_tokens=0)))
    assert violations(error) == {
        "query": "PROMPT_EMPTY",
        "documents[0]": "PROMPT_EMPTY",
        "truncate_prompt_tokens": "OUT_OF_RANGE",
    }
    assert len(server.engine.poolings) == seen


@pytest.mark.parametrize("fault", ["priority", "adapter"])
async def test_options_that_the_model_does_not_have(fault: str, server: Serving) -> None:
    """As for generation: a priority, or an adapter that was not loaded."""
    options = generation_pb2.RequestOptions(**{"priority": {"priority": 1}, "adapter": {"adapter": "style"}}[fault])
    for call in (
        server.inference.Embed(pb.EmbedRequest(inputs=[TEXT], request_options=options)),
        server.inference.Score(pb.ScoreRequest(query="q", documents=["d"], request_options=options)),
    ):
        error = await error_of(call)
        if fault == "priority":
            assert violations(error) == {"request_options.priority": "PRIORITY_UNSUPPORTED"}
        else:
            assert error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


async def test_a_model_that_does_not_do_the_task(tmp_path: Path) -> None:
    """FAILED_PRECONDITION naming the tasks that it does."""
    async with serving(tmp_path) as server:
        await server.load()
        for call in calls(server):
            error = await error_of(call())
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert error_info(error).reason == "TASK_UNSUPPORTED"
            assert error_info(error).metadata["supported_tasks"] == "generate"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UnavailableError("QUEUE_FULL", "full"), grpc.StatusCode.UNAVAILABLE),
        (InvalidArgumentError([FieldViolation("inputs[0].text", "too long")]), grpc.StatusCode.INVALID_ARGUMENT),
        (RuntimeError("unforeseen"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_the_engine_fails_with_is_the_status(
    failure: Exception, code: grpc.StatusCode, server: Serving
) -> None:
    """By the one table."""
    server.engine.failure = failure
    for call in calls(server):
        assert (await error_of(call())).code() == code


async def test_an_unknown_model_is_not_found(server: Serving) -> None:
    """As for every other call."""
    error = await error_of(server.inference.Embed(pb.EmbedRequest(model="other", inputs=[TEXT])))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    error = await error_of(server.inference.Score(pb.ScoreRequest(model="other", query="q", documents=["d"])))
    assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_a_caller_who_leaves_frees_the_places(server: Serving) -> None:
    """Cancelled, or out of time."""
    for begin, request in ((server.inference.Embed, EMBED), (server.inference.Score, SCORE)):
        server.engine.first_gate.clear()
        call = begin(request)
        await asyncio.wait_for(server.engine.busy.wait(), TIMEOUT_S)
        call.cancel()
        await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)
        server.engine.first_gate.set()
    server.engine.first_gate.clear()
    error = await error_of(server.inference.Embed(EMBED, timeout=0.05))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)


async def test_abort_ends_it_cancelled(server: Serving) -> None:
    """It has nothing to show before its end."""
    server.engine.first_gate.clear()
    call = server.inference.Embed(EMBED, metadata=[("x-request-id", "mine")])
    await asyncio.wait_for(server.engine.busy.wait(), TIMEOUT_S)
    assert (await server.inference.Abort(pb.AbortRequest(request_ids=["mine"]))).aborted_calls == 1
    assert (await error_of(call)).code() == grpc.StatusCode.CANCELLED
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)
