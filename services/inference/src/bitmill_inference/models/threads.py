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


# How often work that was cancelled is hastened.
HASTEN_INTERVAL_S = 0.2


async def in_thread(
    work: Callable[..., T],
    *arguments: object,
    undo: Callable[[T], None] = lambda result: None,
    hasten: Callable[[], None] = lambda: None,
) -> T:
    """Calls blocking work in a thread. A cancellation waits for its end, and undoes it when it has succeeded.

    `hasten` is called on the event loop meanwhile, again and again.
    """
    working = _submit(work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await _ended(working, hasten)
        if working.exception() is None:
            undoing = _submit(undo, working.result())
            await _ended(undoing)
            undoing.result()
        raise


async def _ended(working: asyncio.Future[T], hasten: Callable[[], None] = lambda: None) -> None:
    """Returns when it has ended; whoever cancels meanwhile waits for the same."""
    while not working.done():
        hasten()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({working}, timeout=HASTEN_INTERVAL_S)


def _submit(work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(work, *arguments))
