"""Waits for what an engine core answers itself: vLLM leaves such a call open for ever when the core dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bitmill_common.errors import UnavailableError

T = TypeVar("T")

# How often a call without an answer looks whether anybody is there to give one.
INTERVAL_S = 0.5


async def answered(call: Coroutine[Any, Any, T], is_dead: Callable[[], bool]) -> T:
    """Returns what a call to an engine core does. Raises `UnavailableError` ENGINE_DIED once the core `is_dead`."""
    calling = asyncio.ensure_future(call)
    try:
        while not calling.done():
            if is_dead():
                raise UnavailableError("ENGINE_DIED", "the engine of this model has died")
            await asyncio.wait({calling}, timeout=INTERVAL_S)
        return calling.result()
    finally:
        calling.cancel()
