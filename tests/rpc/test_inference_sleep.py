"""Sleep and wake: the model drains, frees its memory, and comes back as it was or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import inference_service_pb2, model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill_common.artifact import Device
from bitmill_common.errors import InternalError, UnavailableError
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.requests.generation import Chunk, Finish, FinishReason, Usage
from support.fake_inference_engine import TEXT
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving
from support.restart_clock import RestartClock


@pytest.fixture
async def clock() -> RestartClock:
    """The supervisors' time."""
    return RestartClock()


@pytest.fixture
async def server(tmp_path: Path, clock: RestartClock) -> AsyncIterator[Serving]:
    """A server whose device has a sleep mode."""
    async with serving(tmp_path, restarts=clock.policy) as running:
        running.engines.server_device = ServerDevice(Device.CUDA, 90, sleep_mode=True)
        yield running


async def sleep(server: Serving, name: str = "tiny") -> model_pb2.Model:
    return (await server.models.SleepModel(pb.SleepModelRequest(name=name), timeout=TIMEOUT_S)).model


async def wake(server: Serving, name: str = "tiny") -> model_pb2.Model:
    return (await server.models.WakeModel(pb.WakeModelRequest(name=name), timeout=TIMEOUT_S)).model


async def failure_of(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def generate(server: Serving, model: str = "tiny") -> str:
    request = inference_service_pb2.GenerateUnaryRequest(model=model, text="x")
    return (await server.inference.GenerateUnary(request)).sequences[0].text


def said(text: str) -> list[Chunk]:
    return [Chunk(0, text, [ord(letter) for letter in text], finish=Finish(FinishReason.STOP), usage=Usage(1, 1, 0))]


async def test_a_model_sleeps_and_wakes(server: Serving) -> None:
    """By name or alias; asleep it takes no calls, and twice is once."""
    await server.load(enable_sleep_mode=True)
    await server.models.SetAlias(pb.SetAliasRequest(alias="chat", name="tiny"))
    assert (await sleep(server, "chat")).state == model_pb2.MODEL_STATE_SLEEPING
    assert (await sleep(server)).state == model_pb2.MODEL_STATE_SLEEPING
    assert server.engine.asleep
    refused = await failure_of(generate(server))
    assert (refused.code(), error_info(refused).reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_SLEEPING")
    assert not await server.is_serving()
    assert not await server.is_serving("chat")
    assert (await wake(server, "chat")).state == model_pb2.MODEL_STATE_SERVING
    assert (await wake(server)).state == model_pb2.MODEL_STATE_SERVING
    assert not server.engine.asleep
    assert await generate(server) == TEXT
    assert await server.is_serving("chat")


async def test_sleep_lets_the_running_calls_end_first(server: Serving) -> None:
    """New ones are refused meanwhile; the work goes on when its caller leaves."""
    await server.load(enable_sleep_mode=True)
    engine = server.engine
    engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(text="x"))
    text = (await stream.read()).text
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    call = server.models.SleepModel(pb.SleepModelRequest(name="tiny"))
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    assert error_info(await failure_of(generate(server))).reason == "MODEL_DRAINING"
    call.cancel()
    assert not engine.asleep
    engine.gate.set()
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        text += chunk.text
    assert text == TEXT
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_SLEEPING


async def test_sleep_and_wake_at_once_leave_the_model_in_one_state(server: Serving) -> None:
    """Each takes effect after the other."""
    await server.load(enable_sleep_mode=True)
    calls = [sleep(server), wake(server)] * 5
    await asyncio.gather(*calls, return_exceptions=True)
    await wake(server)
    assert await generate(server) == TEXT
    assert len(server.engines.started) == 1


async def test_a_model_without_the_option_does_not_sleep(server: Serving) -> None:
    """FAILED_PRECONDITION says what was missing at its load."""
    await server.load()
    refused = await failure_of(sleep(server))
    assert (refused.code(), error_info(refused).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SLEEP_NOT_ENABLED")
    assert await generate(server) == TEXT


async def test_a_device_without_sleep_mode_is_told_at_the_load(tmp_path: Path) -> None:
    """Before an engine starts."""
    async with serving(tmp_path) as server:
        refused = await failure_of(server.load(enable_sleep_mode=True))
        assert (refused.code(), error_info(refused).reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "SLEEP_MODE_UNSUPPORTED",
        )
        assert server.engines.started == []


async def test_a_model_that_does_not_answer_as_before_is_started_again(server: Serving, clock: RestartClock) -> None:
    """WakeModel returns when the new engine serves; no call has seen the damaged one."""
    await server.load(enable_sleep_mode=True)
    damaged = server.engine
    await sleep(server)
    damaged.script = said("damaged")
    waking = asyncio.create_task(wake(server))
    await clock.paused()
    model = await server.get()
    assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_RESTARTING, "WAKE_CHECK_FAILED")
    clock.end_pause()
    assert ((await waking).state, (await waking).restarts) == (model_pb2.MODEL_STATE_SERVING, 1)
    assert damaged.stopped
    assert await generate(server) == TEXT


async def test_an_engine_that_fails_to_sleep_is_started_again(server: Serving, clock: RestartClock) -> None:
    """The caller is told; nobody knows what the engine still had."""
    await server.load(enable_sleep_mode=True)
    server.engine.failure = InternalError("GENERATION_FAILED", "no")
    assert (await failure_of(sleep(server))).code() == grpc.StatusCode.INTERNAL
    await clock.paused()
    assert (await server.get()).state == model_pb2.MODEL_STATE_RESTARTING


async def test_an_engine_that_dies_asleep_is_started_again(server: Serving, clock: RestartClock) -> None:
    """It serves then, as after any death."""
    await server.load(enable_sleep_mode=True)
    await sleep(server)
    server.engine.die()
    await clock.paused()
    waking = asyncio.create_task(failure_of(wake(server)))
    assert error_info(await waking).reason == "MODEL_RESTARTING"
    clock.end_pause()
    async for response in server.models.WatchModel(pb.WatchModelRequest(name="tiny"), timeout=TIMEOUT_S):
        if response.model.state == model_pb2.MODEL_STATE_SERVING:
            break
    assert await generate(server) == TEXT


async def test_an_engine_that_dies_on_its_way_to_sleep_is_started_again(server: Serving, clock: RestartClock) -> None:
    """The calls that it drained end UNAVAILABLE, and so does SleepModel."""
    await server.load(enable_sleep_mode=True)
    engine = server.engine
    engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(text="x"))
    await stream.read()
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    sleeping = asyncio.create_task(failure_of(sleep(server)))
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    engine.die()
    assert (await sleeping).code() == grpc.StatusCode.UNAVAILABLE
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_RESTARTING
    assert await clock.paused() == 1


async def test_an_engine_that_dies_at_its_check_is_started_again_once(server: Serving, clock: RestartClock) -> None:
    """Its death and the failed check are one cause; the new engine is not held to it."""
    await server.load(enable_sleep_mode=True)
    server.engine.failure = UnavailableError("ENGINE_DIED", "dead")
    server.engine.die()
    await failure_of(sleep(server))
    await clock.paused()
    clock.end_pause()
    async for response in server.models.WatchModel(pb.WatchModelRequest(name="tiny"), timeout=TIMEOUT_S):
        if response.model.state == model_pb2.MODEL_STATE_SERVING:
            break
    assert (await sleep(server)).state == model_pb2.MODEL_STATE_SLEEPING
    assert (await wake(server)).restarts == 1
    assert clock.pauses == [1]


async def test_an_engine_that_dies_at_its_wake_is_not_woken_by_whoever_waits(
    server: Serving, clock: RestartClock
) -> None:
    """Every caller is told, and the engine that takes its place serves undisturbed."""
    await server.load(enable_sleep_mode=True)
    await sleep(server)
    engine = server.engine
    waking = asyncio.Event()
    wakes: list[None] = []

    async def wake_for_ever() -> None:
        wakes.append(None)
        waking.set()
        await asyncio.Event().wait()

    engine.wake = wake_for_ever  # type: ignore[method-assign]
    calls = [asyncio.create_task(server.registry.wake("tiny")) for _ in range(3)]
    await asyncio.wait_for(waking.wait(), TIMEOUT_S)
    engine.die()
    assert await clock.paused() == 1
    async with asyncio.timeout(TIMEOUT_S):
        told = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in told] == [UnavailableError] * 3
    assert len(wakes) == 1
    clock.end_pause()
    async for response in server.models.WatchModel(pb.WatchModelRequest(name="tiny"), timeout=TIMEOUT_S):
        if response.model.state == model_pb2.MODEL_STATE_SERVING:
            break
    assert await generate(server) == TEXT


async def test_a_server_stops_with_its_models_asleep_or_on_their_way(server: Serving) -> None:
    """Every engine is stopped; whoever waited is told."""
    for name in ("asleep", "falling"):
        await server.load(name, enable_sleep_mode=True)
    await sleep(server, "asleep")
    server.engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(model="falling", text="x"))
    await stream.read()
    states = server.models.WatchModel(pb.WatchModelRequest(name="falling"))
    await states.read()
    falling = asyncio.create_task(failure_of(sleep(server, "falling")))
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    server.registry.begin_stopping()
    assert (await falling).code() == grpc.StatusCode.UNAVAILABLE
    await server.registry.stop()
    assert all(engine.stopped for engine in server.engines.started)
    assert server.registry.list() == []


async def test_a_model_can_be_unloaded_asleep_and_on_its_way_there(server: Serving) -> None:
    """Unload wins over the sleep, whose caller is told."""
    await server.load(enable_sleep_mode=True)
    await sleep(server)
    await server.unload()
    assert server.engine.stopped
    await server.load(enable_sleep_mode=True)
    engine = server.engine
    engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(text="x"))
    await stream.read()
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    sleeping = asyncio.create_task(failure_of(sleep(server)))
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    unloading = asyncio.create_task(server.unload())
    assert error_info(await sleeping).reason == "MODEL_DRAINING"
    engine.gate.set()
    await unloading
    assert engine.stopped
    assert not engine.asleep
    assert await server.list() == []
