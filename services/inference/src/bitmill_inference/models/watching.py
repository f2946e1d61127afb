"""What one watcher of a model has not read yet, and how far a phase of a load is: both bounded, whoever reads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from bitmill_inference.models.model import LoadProgress, Model

MAX_UNREAD = 32
# A watcher sees a phase move, and the loop has other things to do.
PROGRESS_INTERVAL_S = 0.25


class Watch:
    """The states of a model that one watcher has not read yet, at most `MAX_UNREAD`.

    Of those alike in state and phase only the latest is kept, and when the watcher reads nothing at all, the first
    ones and the latest.
    """

    def __init__(self) -> None:
        self._unread: deque[Model] = deque()
        self._there = asyncio.Event()

    def put(self, model: Model) -> None:
        """Notes what the model is now."""
        last = self._unread[-1] if self._unread else None
        if last and (len(self._unread) == MAX_UNREAD or (last.state, last.phase) == (model.state, model.phase)):
            self._unread.pop()
        self._unread.append(model)
        self._there.set()

    async def get(self) -> Model:
        """Returns the oldest state that was not read, once there is one."""
        await self._there.wait()
        model = self._unread.popleft()
        if not self._unread:
            self._there.clear()
        return model


class ByteCounter:
    """Counts the bytes of one phase of a load, in whatever threads, and reports now and then to the event loop."""

    def __init__(self, total_bytes: int, report: Callable[[LoadProgress], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._total = total_bytes
        self._completed = 0
        self._lock = threading.Lock()
        self._reported_at = time.monotonic()
        self._finished = False

    def add(self, count: int) -> None:
        """Counts bytes. Called from a worker's thread."""
        with self._lock:
            self._completed += count
            now = time.monotonic()
            due = now - self._reported_at >= PROGRESS_INTERVAL_S
            if due:
                self._reported_at = now
        if due:
            self._loop.call_soon_threadsafe(self._tell)

    def finish(self) -> None:
        """Reports the last count. Called on the event loop, when the phase has ended."""
        self._tell()
        self._finished = True

    def _tell(self) -> None:
        if not self._finished:
            self._report(LoadProgress(self._completed, self._total))
