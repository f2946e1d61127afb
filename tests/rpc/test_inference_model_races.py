"""Loads, unloads, swaps, sleeps and deaths all at once: whatever comes first, nothing hangs and no engine is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from bitmill_common.artifact import Device
from bitmill_common.errors import BitmillError, FailedPreconditionError
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.model import ModelState
from bitmill_inference.models.supervisor import RestartPolicy
from support.inference_serving import Serving, serving

NAMES = ("a", "b", "c")
OPTIONS = EngineOptions(enable_sleep_mode=True)
STEPS = 60


async def breathe(chance: random.Random) -> None:
    """Lets others go on, their threads too, for as long as chance has it."""
    for _ in range(chance.randrange(6)):
        await (asyncio.sleep(0) if chance.random() < 0.5 else asyncio.to_thread(int))


async def act(server: Serving, chance: random.Random) -> None:
    """Does something to some model."""
    models, name = server.registry, chance.choice(NAMES)
    match chance.randrange(20):
        case 0 | 1 | 2 | 3:
            aliases = chance.sample(["x", "y"], chance.randrange(3))
            replaced = chance.random() < 0.5
            uri = server.checkpoint_uri
            await models.load(name, uri, OPTIONS, aliases=aliases, unload_replaced=replaced, wait=chance.random() < 0.7)
        case 4:
            await models.unload(name)
        case 5 | 6 | 7:
            await models.sleep(name)
        case 8 | 9 | 10:
            await models.wake(name)
        case 11 | 12:
            await models.set_alias(chance.choice(["x", "y"]), name)
        case 13 | 14:
            chance.choice(server.engines.started[-3:]).die()
        case 15:
            server.engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "no memory")
        case _:
            with models.lease(chance.choice([name, "x", "y", ""])):
                await breathe(chance)


async def someone(server: Serving, chance: random.Random) -> None:
    """Acts again and again. Half of the callers leave before the answer."""
    for _ in range(STEPS):
        acting = asyncio.create_task(act(server, chance))
        await breathe(chance)
        if chance.random() < 0.3:
            acting.cancel()
        with contextlib.suppress(BitmillError, asyncio.CancelledError):
            await acting
        await breathe(chance)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_at_once_ends_well(seed: int, tmp_path: Path) -> None:
    """Afterwards each model can be unloaded, and every engine that was started is stopped."""
    chance = random.Random(seed)
    async with serving(tmp_path, restarts=RestartPolicy(initial_s=0, max_s=0)) as server:
        server.engines.server_device = ServerDevice(Device.CUDA, 90, sleep_mode=True)
        for name in NAMES:
            await server.registry.load(name, server.checkpoint_uri, OPTIONS)
        async with asyncio.timeout(60):
            await asyncio.gather(*(someone(server, random.Random(chance.random())) for _ in range(6)))
            server.engines.failure = None
            assert {model.state for model in server.registry.list()}.isdisjoint({ModelState.UNLOADED})
            if seed % 2:
                await asyncio.gather(*(server.registry.unload(model.name) for model in server.registry.list()))
            else:
                server.registry.begin_stopping()
                await server.registry.stop()
        assert server.registry.list() == []
        assert all(engine.stopped for engine in server.engines.started)
