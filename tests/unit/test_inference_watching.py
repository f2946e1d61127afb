"""What a watcher of a model gets to see, and how the bytes of a load are reported."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime

from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.model import LoadPhase, LoadProgress, Model, ModelState
from bitmill_inference.models.watching import MAX_UNREAD, ByteCounter, Watch

MODEL = Model("tiny", "file:///tiny", EngineOptions(), datetime(2026, 1, 1, tzinfo=UTC))


async def test_a_slow_watcher_sees_every_phase_with_its_latest_progress() -> None:
    """A thousand reports of one phase are one state to read."""
    watch = Watch()
    for phase in (LoadPhase.FETCH, LoadPhase.VERIFY, LoadPhase.START_ENGINE):
        for done in range(1000):
            watch.put(replace(MODEL, phase=phase, progress=LoadProgress(done, 999)))
    seen = [await watch.get() for _ in range(3)]
    assert [model.phase for model in seen] == [LoadPhase.FETCH, LoadPhase.VERIFY, LoadPhase.START_ENGINE]
    assert all(model.progress == LoadProgress(999, 999) for model in seen)


async def test_a_watcher_that_never_reads_costs_bounded_memory_and_still_gets_the_latest() -> None:
    """Through however many restarts."""
    watch = Watch()
    for restarts in range(10_000):
        watch.put(replace(MODEL, state=ModelState.RESTARTING, restarts=restarts))
        watch.put(replace(MODEL, state=ModelState.SERVING, restarts=restarts))
    watch.put(replace(MODEL, state=ModelState.UNLOADED))
    seen = [await watch.get() for _ in range(MAX_UNREAD)]
    assert seen[-1].state is ModelState.UNLOADED
    waiting = asyncio.create_task(watch.get())
    watch.put(MODEL)
    assert await waiting is MODEL


async def test_bytes_are_counted_in_threads_and_reported_now_and_then() -> None:
    """Not at each megabyte; the last report has them all, and none comes after it."""
    reports: list[LoadProgress] = []
    counter = ByteCounter(400_000, reports.append)
    threads = [threading.Thread(target=lambda: [counter.add(1) for _ in range(100_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    counter.finish()
    last = len(reports)
    assert reports[-1] == LoadProgress(400_000, 400_000)
    assert last < 1000
    await asyncio.to_thread(counter.add, 1)
    await asyncio.sleep(0)
    assert len(reports) == last
