"""Blocking work of loads, in threads of its own: it may last minutes, and calls need the event loop's few threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Each load and each unload uses one at a time.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="load")


async def in_thread(work: Callable[..., T], *arguments: object, undo: Callable[[T], None] = lambda result: None) -> T:
    """Calls blocking work in a thread. A cancellation waits for its end, and undoes it when it has succeeded."""
    working = _submit(work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            # Whoever cancels again waits for the same.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({working})
        if working.exception() is None:
            await _submit(undo, working.result())
        raise


def _submit(work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(work, *arguments))
