"""Blocking work of loads in threads: given up without losing what it made, and never in the way of calls."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bitmill_inference.models.threads import in_thread

DEADLINE_S = 20


async def test_what_a_cancelled_work_made_is_undone() -> None:
    """Once it has ended, however often it is cancelled before."""
    begun, proceed = threading.Event(), threading.Event()
    undone: list[str] = []

    def work() -> str:
        begun.set()
        assert proceed.wait(DEADLINE_S)
        return "made"

    task = asyncio.create_task(in_thread(work, undo=undone.append))
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, DEADLINE_S)
    assert undone == ["made"]


async def test_work_is_hastened_until_it_ends_however_often_it_is_cancelled() -> None:
    """A second cancellation does not leave it behind, nor its undoing."""
    begun, proceed, undoing, undo = (threading.Event() for _ in range(4))
    hastened: asyncio.Queue[None] = asyncio.Queue()
    undone: list[bool] = []

    def work() -> bool:
        begun.set()
        return proceed.wait(DEADLINE_S)

    def undo_late(result: bool) -> None:
        undoing.set()
        assert undo.wait(DEADLINE_S)
        undone.append(result)

    task = asyncio.create_task(in_thread(work, undo=undo_late, hasten=lambda: hastened.put_nowait(None)))
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    for _ in range(3):
        task.cancel()
        await asyncio.wait_for(hastened.get(), DEADLINE_S)
    proceed.set()
    assert await asyncio.to_thread(undoing.wait, DEADLINE_S)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    undo.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, DEADLINE_S)
    assert undone == [True]


async def test_work_that_fails_raises_what_it_failed_with() -> None:
    """And there is nothing to undo."""

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_thread(fail, undo=lambda result: pytest.fail("undone"))


async def test_loads_that_wait_leave_threads_for_calls() -> None:
    """More of them than the event loop has threads."""
    proceed = threading.Event()
    waiting = [asyncio.create_task(in_thread(proceed.wait, DEADLINE_S)) for _ in range(40)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), DEADLINE_S) == 1
    finally:
        proceed.set()
        assert all(await asyncio.gather(*waiting))
