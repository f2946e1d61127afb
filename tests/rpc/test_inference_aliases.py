"""Aliases: further names of models, which move from one to another under load without a failed call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import inference_service_pb2, model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from support.fake_inference_engine import TEXT
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations

STREAMS = 50


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with one checkpoint."""
    async with serving(tmp_path) as running:
        yield running


async def load(
    server: Serving, name: str, *aliases: str, unload_replaced: bool = False, return_immediately: bool = False
) -> model_pb2.Model:
    request = pb.LoadModelRequest(
        name=name,
        uri=server.checkpoint_uri,
        aliases=aliases,
        unload_replaced=unload_replaced,
        return_immediately=return_immediately,
    )
    return (await server.models.LoadModel(request, timeout=TIMEOUT_S)).model


async def set_alias(server: Serving, alias: str, name: str) -> model_pb2.Model:
    return (await server.models.SetAlias(pb.SetAliasRequest(alias=alias, name=name))).model


async def generate(server: Serving, model: str) -> str:
    request = inference_service_pb2.GenerateUnaryRequest(model=model, text="x")
    return (await server.inference.GenerateUnary(request)).sequences[0].text


async def aliases(server: Serving) -> dict[str, list[str]]:
    return {model.name: list(model.aliases) for model in await server.list()}


async def test_a_model_answers_to_its_aliases(server: Serving) -> None:
    """Those of its load and those set later; each has a health of its own."""
    assert list((await load(server, "a", "chat", "best")).aliases) == ["best", "chat"]
    assert list((await set_alias(server, "default", "a")).aliases) == ["best", "chat", "default"]
    for name in ("a", "chat", "best", "default"):
        assert await generate(server, name) == TEXT
        assert await server.is_serving(name)
    await server.models.DeleteAlias(pb.DeleteAliasRequest(alias="chat"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(server, "chat")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert not await server.is_serving("chat")
    assert await server.is_serving("best")
    await server.unload("a")
    assert not await server.is_serving("best")


async def test_an_alias_moves_to_another_model(server: Serving) -> None:
    """Calls that run stay where they are; new ones go to the other."""
    await load(server, "a", "chat")
    old = server.engine
    old.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(model="chat", text="x"))
    text = (await stream.read()).text
    await load(server, "b")
    new = server.engine
    await set_alias(server, "chat", "b")
    assert await aliases(server) == {"a": [], "b": ["chat"]}
    assert await generate(server, "chat") == TEXT
    assert [len(engine.requests) for engine in (old, new)] == [2, 2]
    old.gate.set()
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        text += chunk.text
    assert text == TEXT


async def test_an_alias_is_not_counted_as_a_model(server: Serving) -> None:
    """The empty name means the one model there is, however many names it has."""
    await load(server, "a", "chat", "best")
    assert await generate(server, "") == TEXT


@pytest.mark.parametrize("alias", ["", "Chat", "a--b", "a/b"])
async def test_an_alias_follows_the_rules_of_names(alias: str, server: Serving) -> None:
    """In LoadModel as in SetAlias."""
    await load(server, "a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_alias(server, alias, "a")
    assert violations(caught.value) == {"alias": "INVALID_NAME"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(server, "b", "fine", alias)
    assert violations(caught.value) == {"aliases[1]": "INVALID_NAME"}
    assert await aliases(server) == {"a": []}


async def test_a_name_is_either_a_models_or_an_alias(server: Serving) -> None:
    """Also while the model with the alias is still loading."""
    await load(server, "a", "chat")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_alias(server, "a", "a")
    assert violations(caught.value) == {"alias": "ALIAS_IS_MODEL"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(server, "b", "a", "b")
    assert violations(caught.value) == {"aliases[0]": "ALIAS_IS_MODEL", "aliases[1]": "ALIAS_IS_MODEL"}
    server.engines.gate.clear()
    await load(server, "b", "soon", return_immediately=True)
    for name in ("chat", "soon"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await load(server, name)
        assert violations(caught.value) == {"name": "NAME_IS_ALIAS"}
    await server.unload("b")
    server.engines.gate.set()
    await load(server, "soon")


async def test_at_most_sixteen_aliases_come_with_a_load(server: Serving) -> None:
    """More are refused."""
    await load(server, "a", *(f"alias{number}" for number in range(16)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(server, "b", *(f"alias{number}" for number in range(17)))
    assert violations(caught.value) == {"aliases": "TOO_MANY"}


async def test_an_alias_leads_to_a_serving_model_only(server: Serving) -> None:
    """Not to an unknown one, and not to one that loads or drains; it stays where it was."""
    await load(server, "a", "chat")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_alias(server, "chat", "nope")
    assert error_info(caught.value).reason == "MODEL_NOT_FOUND"
    server.engines.gate.clear()
    await load(server, "b", return_immediately=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_alias(server, "chat", "b")
    assert error_info(caught.value).reason == "MODEL_LOADING"
    assert await generate(server, "chat") == TEXT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.models.DeleteAlias(pb.DeleteAliasRequest(alias="nope"))
    assert error_info(caught.value).reason == "ALIAS_NOT_FOUND"
    server.engines.gate.set()


async def test_an_alias_of_a_draining_model_can_be_moved_away(server: Serving) -> None:
    """Until then its calls are told that the model drains."""
    await load(server, "a", "chat")
    await load(server, "b")
    draining = server.engines.started[0]
    draining.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(model="a", text="x"))
    await stream.read()
    unloading = asyncio.create_task(server.unload("a"))
    states = server.models.WatchModel(pb.WatchModelRequest(name="a"))
    while (await states.read()).model.state != model_pb2.MODEL_STATE_DRAINING:
        pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(server, "chat")
    assert error_info(caught.value).reason == "MODEL_DRAINING"
    await set_alias(server, "chat", "b")
    assert await generate(server, "chat") == TEXT
    draining.gate.set()
    await unloading
    assert await generate(server, "chat") == TEXT


async def test_a_load_of_a_serving_model_gives_it_further_aliases(server: Serving) -> None:
    """The same request is idempotent otherwise; the moved alias may leave the other model without one."""
    await load(server, "a", "chat")
    await load(server, "b")
    model = await load(server, "b", "chat", unload_replaced=True)
    assert list(model.aliases) == ["chat"]
    await gone(server, "a")
    assert len(server.engines.started) == 2


async def test_only_models_that_lose_their_last_alias_are_unloaded(server: Serving) -> None:
    """Not one that keeps another alias, and not one that never had one."""
    await load(server, "a", "chat", "small")
    await load(server, "bystander")
    await load(server, "b", "chat", unload_replaced=True)
    assert await aliases(server) == {"a": ["small"], "b": ["chat"], "bystander": []}


async def test_a_failed_load_leaves_its_aliases_where_they_were(server: Serving) -> None:
    """Callers do not notice it."""
    await load(server, "a", "chat")
    server.engines.failure = RuntimeError("no")
    with pytest.raises(grpc.aio.AioRpcError):
        await load(server, "b", "chat", unload_replaced=True)
    assert await aliases(server) == {"a": ["chat"], "b": []}
    assert await generate(server, "chat") == TEXT


async def test_a_hot_swap_under_load_fails_no_call(server: Serving) -> None:
    """Streams run and begin all the time; those of the old engine end whole before it stops."""
    await load(server, "v1", "chat")
    engines = server.engines
    stopping = asyncio.Event()
    finished = 0

    async def caller(number: int) -> None:
        nonlocal finished
        while not stopping.is_set():
            call = server.inference.Generate(
                # Every other one without a name: the one model that serves.
                inference_service_pb2.GenerateRequest(model="chat" if number % 2 else "", text="x")
            )
            assert "".join([chunk.text async for chunk in call]) == TEXT
            finished += 1

    callers = [asyncio.create_task(caller(number)) for number in range(STREAMS)]
    for version in range(2, 6):
        before = finished
        await load(server, f"v{version}", "chat", unload_replaced=True)
        await gone(server, f"v{version - 1}")
        while finished < before + 2 * STREAMS:
            await asyncio.wait(callers, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            assert not any(task.done() for task in callers)
    stopping.set()
    await asyncio.gather(*callers)
    assert await aliases(server) == {"v5": ["chat"]}
    assert [engine.stopped for engine in engines.started] == [True] * 4 + [False]
    assert all(engine.num_running == 0 for engine in engines.started)


async def gone(server: Serving, name: str) -> None:
    """Returns once a model is unloaded."""
    # It may be gone already.
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in server.models.WatchModel(pb.WatchModelRequest(name=name), timeout=TIMEOUT_S):
            pass
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.get(name)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
