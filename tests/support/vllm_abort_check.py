"""Does vLLM forget a request that its caller leaves or aborts? Run with the inference environment's python.

The argument is a checkpoint. Leaves by closing the generator, by cancelling the task that reads it, by a deadline, and
aborts by id, each with one and with several sequences. Prints as JSON for each whether the engine core, a process of
its own, had work while the request ran and a few steps after, and what engine and core still hold then; and what vLLM
is given of a request's options.
"""

import asyncio
import json
import os
import sys
import tempfile
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}

from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.requests.generation import RequestOptions
from bitmill_inference.requests.prompts import TextPrompt
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.vllm.engine import VllmEngine
from bitmill_inference.vllm.factory import VllmEngineFactory

WAYS = ("close", "cancel", "deadline", "abort", "abort_unary")
# Hundreds of steps long.
ENDLESS = SamplingParams(temperature=1, seed=0, ignore_eos=True)
ONE_STEP = SamplingParams(max_tokens=1)
# The core notes in its next step that a request is gone; it answers between steps.
STEPS = 5


async def core_has_work(engine: VllmEngine) -> bool:
    return bool(await engine.async_llm.engine_core.call_utility_async("has_work"))


async def core_still_has_work(engine: VllmEngine) -> bool:
    return all([await core_has_work(engine) for _ in range(STEPS)])


async def read(engine: VllmEngine, n: int, started: asyncio.Event, *, stream: bool = True) -> list[str]:
    """Reads to the end and returns why each sequence ended."""
    params = replace(ENDLESS, n=n)
    chunks = engine.generate(TextPrompt("a"), params, RequestOptions(), stream=stream, request_id="mine")
    ends = []
    async with aclosing(chunks):
        if not stream:
            asyncio.get_running_loop().call_later(0.1, started.set)
        async for chunk in chunks:
            started.set()
            if chunk.finish:
                ends.append(chunk.finish.reason.value)
    return ends


async def leave(engine: VllmEngine, how: str, n: int) -> dict[str, object]:
    started = asyncio.Event()
    ends: list[str] = []
    if how == "close":
        chunks = engine.generate(TextPrompt("a"), replace(ENDLESS, n=n), RequestOptions(), stream=True)
        await anext(chunks)
        while_running = await core_has_work(engine)
        await chunks.aclose()
    else:
        reads = read(engine, n, started, stream=how != "abort_unary")
        reading = asyncio.create_task(asyncio.wait_for(reads, 0.2) if how == "deadline" else reads)
        await started.wait()
        while_running = await core_has_work(engine)
        if how == "cancel":
            reading.cancel()
        elif how.startswith("abort"):
            assert await engine.abort("mine")
        with suppress(asyncio.CancelledError, TimeoutError):
            ends = await reading
    after = await core_still_has_work(engine)
    num_running = engine.num_running
    # The core tells how much of its cache is in use with a step.
    async for _ in engine.generate(TextPrompt("a"), ONE_STEP, RequestOptions(), stream=False):
        pass
    processor = engine.async_llm.output_processor
    return {
        "while_running": while_running,
        "after": after,
        "num_running": num_running,
        "kv_cache_usage": engine.load().kv_cache_usage,
        "remembered": len(processor.parent_requests) + len(processor.external_req_ids),
        "ends": ends,
    }


async def options_given(engine: VllmEngine) -> dict[str, object]:
    """What `AsyncLLM.generate` gets of a request's options."""
    generate = engine.async_llm.generate
    given: dict[str, object] = {}

    def record(**arguments: object) -> object:
        given.update(arguments)
        return generate(**arguments)

    engine.async_llm.generate = record
    options = RequestOptions(
        priority=3, cache_salt="salt", session_id="session", trace_headers={"traceparent": "00-1-2-01"}
    )
    async for _ in engine.generate(TextPrompt("a"), ONE_STEP, options, stream=False, request_id="mine"):
        pass
    del engine.async_llm.generate
    names = ("priority", "session_id", "trace_headers", "request_id", "lora_request")
    return {name: given[name] for name in names} | {"cache_salt": given["prompt"]["cache_salt"]}


async def main() -> None:
    options = EngineOptions(enforce_eager=True, kv_cache_memory_bytes=64 * 2**20)
    engine = await VllmEngineFactory(Path(tempfile.gettempdir())).start(Path(sys.argv[1]), options)
    results = {f"{how}-{n}": await leave(engine, how, n) for how in WAYS for n in (1, 3)}
    results["options"] = await options_given(engine)
    await engine.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
