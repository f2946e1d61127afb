"""An engine that dies: its streams end, health turns, and a supervisor starts it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from bitmill.inference.v1 import inference_service_pb2, model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.models import model_entry
from support.fake_inference_engine import TEXT
from support.inference_serving import SERVICE, TIMEOUT_S, Serving, error_info, retry_after_s, serving
from support.restart_clock import RestartClock


@pytest.fixture
async def clock() -> RestartClock:
    """The supervisors' time."""
    return RestartClock()


@pytest.fixture
async def server(tmp_path: Path, clock: RestartClock) -> AsyncIterator[Serving]:
    """A server with one checkpoint, on the test's clock."""
    async with serving(tmp_path, restarts=clock.policy) as running:
        yield running


async def generate(server: Serving, model: str = "tiny") -> str:
    request = inference_service_pb2.GenerateUnaryRequest(model=model, text="x")
    return (await server.inference.GenerateUnary(request)).sequences[0].text


async def refusal(server: Serving, model: str = "tiny") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(server, model)
    return caught.value


async def serves_again(server: Serving) -> model_pb2.Model:
    """The model once it serves."""
    async with asyncio.timeout(TIMEOUT_S):
        async for response in server.models.WatchModel(pb.WatchModelRequest(name="tiny")):
            if response.model.state == model_pb2.MODEL_STATE_SERVING:
                return response.model
    raise AssertionError("the watch ended")


async def test_a_dead_engine_is_started_again_and_the_server_lives_on(server: Serving, clock: RestartClock) -> None:
    """The running stream ends UNAVAILABLE, health turns, calls are told when to try again; then all is as before."""
    await server.load()
    await server.load("other")
    dying = server.engines.started[0]
    dying.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(model="tiny", text="x"))
    await stream.read()
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    served = (await states.read()).model
    health = server.health.Watch(health_pb2.HealthCheckRequest(service=f"{SERVICE}/tiny"))
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    dying.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
    restarting = (await states.read()).model
    assert (restarting.state, restarting.error.reason) == (model_pb2.MODEL_STATE_RESTARTING, "ENGINE_DIED")
    assert (restarting.restarts, restarting.serving_time) == (1, served.serving_time)
    assert restarting.restart_time.ToDatetime() > served.serving_time.ToDatetime()
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await clock.paused() == 1
    later = await refusal(server)
    assert (later.code(), error_info(later).reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_RESTARTING")
    assert 0 < retry_after_s(later) <= 1
    assert dying.stopped
    assert await generate(server, "other") == TEXT
    clock.end_pause()
    again = (await states.read()).model
    assert (again.state, again.restarts, again.error.reason) == (model_pb2.MODEL_STATE_SERVING, 1, "")
    assert not again.HasField("restart_time")
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert await generate(server) == TEXT
    assert len(server.engines.started) == 3


async def test_the_pause_doubles_with_each_death_in_a_row_up_to_a_minute(server: Serving, clock: RestartClock) -> None:
    """Starts that fail count as well. An engine that served for five minutes begins with a second again."""
    await server.load()
    for number in range(1, 9):
        server.engine.die()
        await clock.paused()
        if number % 2:
            server.engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "no memory")
            clock.end_pause()
            await clock.paused()
            model = await server.get()
            assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_RESTARTING, "ENGINE_START_FAILED")
            assert model.restarts == number
        clock.end_pause()
        await serves_again(server)
    assert clock.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    clock.now_s += 300
    server.engine.die()
    assert await clock.paused() == 1


async def test_a_restart_that_crashes_is_tried_again(server: Serving, clock: RestartClock) -> None:
    """Whatever the engine raised; its text stays in the log."""
    await server.load()
    server.engine.die()
    await clock.paused()
    server.engines.failure = RuntimeError("secret")
    clock.end_pause()
    assert await clock.paused() == 2
    model = await server.get()
    assert (model.error.reason, "secret" in model.error.message) == ("RESTART_CRASHED", False)
    clock.end_pause()
    await serves_again(server)


async def test_a_first_load_that_fails_is_not_started_again(server: Serving, clock: RestartClock) -> None:
    """Its caller was told; it stays FAILED until somebody loads or unloads it."""
    server.engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "no memory")
    with pytest.raises(grpc.aio.AioRpcError):
        await server.load()
    assert (await server.get()).state == model_pb2.MODEL_STATE_FAILED
    assert clock.pauses == []
    await server.load()


async def test_a_restarting_model_can_be_unloaded(server: Serving, clock: RestartClock) -> None:
    """In the pause, and while its engine starts."""
    for starts in (False, True):
        await server.load()
        server.engines.starting.clear()
        server.engine.die()
        await clock.paused()
        if starts:
            server.engines.gate.clear()
            clock.end_pause()
            await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
        await server.unload()
        assert await server.list() == []
        server.engines.gate.set()
    assert not await server.is_serving()


async def test_a_restarting_model_cannot_be_loaded_again_by_its_name(server: Serving, clock: RestartClock) -> None:
    """The same request is told to wait, another one that the name is taken."""
    await server.load()
    server.engine.die()
    await clock.paused()
    with pytest.raises(grpc.aio.AioRpcError) as same:
        await server.load()
    assert error_info(same.value).reason == "MODEL_RESTARTING"
    # Also to whoever would not wait: its aliases would be lost.
    request = pb.LoadModelRequest(
        name="tiny", uri=server.checkpoint_uri, aliases=["chat"], unload_replaced=True, return_immediately=True
    )
    with pytest.raises(grpc.aio.AioRpcError) as immediate:
        await server.models.LoadModel(request)
    assert error_info(immediate.value).reason == "MODEL_RESTARTING"
    with pytest.raises(grpc.aio.AioRpcError) as other:
        await server.load(max_num_seqs=3)
    assert other.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_a_clock_that_is_set_back_makes_no_caller_wait_for_long(
    server: Serving, clock: RestartClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the restart is then far away by the clock alone."""
    await server.load()
    server.engine.die()
    await clock.paused()
    a_day_ago = model_entry.now() - timedelta(days=1)
    monkeypatch.setattr(model_entry, "now", lambda: a_day_ago)
    assert 0 < retry_after_s(await refusal(server)) <= 60


async def test_an_engine_that_dies_while_it_drains_is_not_started_again(server: Serving, clock: RestartClock) -> None:
    """Its calls end UNAVAILABLE, and the unload with them."""
    await server.load()
    engine = server.engine
    engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(text="x"))
    await stream.read()
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    unloading = asyncio.create_task(server.unload())
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    engine.die()
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()
    await unloading
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_UNLOADED
    assert clock.pauses == []


async def test_a_stopping_server_restarts_nothing(server: Serving, clock: RestartClock) -> None:
    """Neither what restarts already nor what dies while it drains."""
    await server.load()
    await server.load("other")
    server.engines.started[0].die()
    await clock.paused()
    server.registry.begin_stopping()
    server.engines.started[1].die()
    clock.end_pause()
    await server.registry.stop()
    assert len(server.engines.started) == 2
    assert all(engine.stopped for engine in server.engines.started)
