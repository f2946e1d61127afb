"""Does vLLM forget a request that its caller leaves? Run with the inference environment's python and a checkpoint.

Leaves by closing the generator, by cancelling the task that reads it, and by a deadline, and prints as JSON for each
whether the engine core, a process of its own, had work while the request ran and a few steps after the caller left.
"""

import asyncio
import json
import os
import sys
from contextlib import aclosing, suppress
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}

from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.prompts import TextPrompt
from bitmill_inference.sampling import SamplingParams
from bitmill_inference.vllm_engine import VllmEngine
from bitmill_inference.vllm_factory import VllmEngineFactory

# Hundreds of steps long.
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
# The core notes in its next step that a request is gone; it answers between steps.
STEPS = 5


async def core_has_work(engine: VllmEngine) -> bool:
    return bool(await engine._llm.engine_core.call_utility_async("has_work"))


async def core_still_has_work(engine: VllmEngine) -> bool:
    return all([await core_has_work(engine) for _ in range(STEPS)])


async def read(engine: VllmEngine, started: asyncio.Event) -> None:
    async with aclosing(engine.generate(TextPrompt("a"), ENDLESS, stream=True)) as chunks:
        async for _ in chunks:
            started.set()


async def leave(engine: VllmEngine, how: str) -> dict[str, bool | int]:
    started = asyncio.Event()
    if how == "close":
        chunks = engine.generate(TextPrompt("a"), ENDLESS, stream=True)
        await anext(chunks)
        while_running = await core_has_work(engine)
        await chunks.aclose()
    elif how == "cancel":
        reading = asyncio.create_task(read(engine, started))
        await started.wait()
        while_running = await core_has_work(engine)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    else:
        reading = asyncio.create_task(asyncio.wait_for(read(engine, started), 0.2))
        await started.wait()
        while_running = await core_has_work(engine)
        with suppress(TimeoutError):
            await reading
    return {
        "while_running": while_running,
        "after": await core_still_has_work(engine),
        "num_running": engine.num_running,
    }


async def main() -> None:
    options = EngineOptions(enforce_eager=True, kv_cache_memory_bytes=64 * 2**20)
    engine = await VllmEngineFactory(EngineOptions()).start(Path(sys.argv[1]), options)
    results = {how: await leave(engine, how) for how in ("close", "cancel", "deadline")}
    await engine.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
