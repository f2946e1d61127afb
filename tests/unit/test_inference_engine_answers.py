"""Calls that an engine core answers itself, and cores that die meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from bitmill_common.errors import UnavailableError
from bitmill_inference.vllm.answers import answered

DEADLINE_S = 20


async def test_an_answer_is_returned_and_a_failure_raised() -> None:
    """As without a look at the core, also when it dies right after."""

    async def answer() -> str:
        return "yes"

    async def fail() -> str:
        raise ValueError("no")

    assert await answered(answer(), lambda: False) == "yes"
    with pytest.raises(ValueError, match="no"):
        await answered(fail(), lambda: False)


async def test_a_call_ends_when_the_core_dies() -> None:
    """vLLM would leave it open, and with it whatever waits for the model's calls to end."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(UnavailableError) as caught:
        await asyncio.wait_for(answered(wait(), begun.is_set), DEADLINE_S)
    assert caught.value.reason == "ENGINE_DIED"
    await asyncio.wait_for(cancelled.wait(), DEADLINE_S)


async def test_a_call_ends_with_its_caller() -> None:
    """As when the model is unloaded."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    calling = asyncio.create_task(answered(wait(), lambda: False))
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    calling.cancel()
    await asyncio.wait_for(cancelled.wait(), DEADLINE_S)
