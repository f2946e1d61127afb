"""Who may start now: a bound on what each caller has running, and a window that lets a model's calls start together.

One event loop calls everything here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from bitmill_common.errors import UnavailableError
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.ports import Engine

DEFAULT_CALLER_LIMIT = 512

CALLER_LIMIT = "CALLER_LIMIT"
QUEUE_FULL = "QUEUE_FULL"
QUEUE_TOKENS_FULL = "QUEUE_TOKENS_FULL"
REFUSALS = frozenset({CALLER_LIMIT, QUEUE_FULL, QUEUE_TOKENS_FULL})

# Places come free one by one as calls end, so that a caller need not wait for long; each try costs little.
RETRY_AFTER = timedelta(seconds=1)


class Callers:
    """Bounds what each caller has running and waiting at once, on all models together, to `limit` sequences."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, caller: str, sequences: int = 1) -> Iterator[None]:
        """Holds places for a call with that many sequences; raises `UnavailableError` CALLER_LIMIT at once.

        A call that is larger than the bound runs alone, as it could never run otherwise.
        """
        held = self._held[caller]
        if held and held + sequences > self._limit:
            raise UnavailableError(
                CALLER_LIMIT,
                f"caller {caller!r} has {held} sequences running and waiting; {sequences} more exceed its limit of "
                f"{self._limit}",
                {"caller": caller, "held": str(held), "asked": str(sequences), "limit": str(self._limit)},
                RETRY_AFTER,
            )
        self._held[caller] = held + sequences
        try:
            yield
        finally:
            self._held[caller] -= sequences
            if not self._held[caller]:
                del self._held[caller]


class AdmissionWindow:
    """Holds a model's calls back until `min_batch_size` of them wait or the oldest has waited for `batch_timeout_s`.

    They then start together. With a min_batch_size of 1 no call is held back.
    """

    def __init__(self, min_batch_size: int = 1, batch_timeout_s: float = 0) -> None:
        self._min_batch_size = min_batch_size
        self._batch_timeout_s = batch_timeout_s
        # In the order in which they came, with the time when each has waited for long enough.
        self._held: dict[asyncio.Future[None], float] = {}
        self._held_sequences = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None

    @property
    def num_held(self) -> int:
        """Calls that are held back."""
        return len(self._held)

    @property
    def num_held_sequences(self) -> int:
        """Sequences of the calls that are held back."""
        return self._held_sequences

    @property
    def is_on(self) -> bool:
        """Whether calls are ever held back."""
        return self._min_batch_size > 1

    async def wait(self, sequences: int = 1) -> None:
        """Returns when the call may start. A call whose task is cancelled meanwhile leaves the window."""
        if not self.is_on:
            return
        if len(self._held) + 1 >= self._min_batch_size:
            self.release()
            return
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._held[place] = loop.time() + self._batch_timeout_s
        self._held_sequences += sequences
        self._set_timer()
        try:
            await place
        finally:
            self._held_sequences -= sequences
            if self._held.pop(place, None) is not None:
                self._set_timer()

    def release(self) -> None:
        """Lets every call start that is held back."""
        held, self._held = self._held, {}
        for place in held:
            if not place.done():
                place.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        """Waits for the oldest call."""
        due = next(iter(self._held.values()), None)
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self.release)


class ModelAdmission:
    """What one model has of admission: its window, and how many calls were refused for each reason."""

    def __init__(self) -> None:
        self.window = AdmissionWindow()
        self.refused: Counter[str] = Counter()

    def configure(self, options: EngineOptions) -> None:
        """Takes the effective options, before the model's first call."""
        self.window = AdmissionWindow(options.min_batch_size or 1, options.batch_timeout or 0)

    async def start(self, engine: Engine, sequences: int) -> None:
        """Returns when a call with that many sequences may go to the engine, which then asks about its queue again.

        Raises `UnavailableError` at once, and not when the window opens, for a queue that is full.
        """
        if self.window.is_on:
            engine.check_queue(sequences, self.window.num_held_sequences)
            await self.window.wait(sequences)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the call when it is refused."""
        try:
            yield
        except UnavailableError as error:
            if error.reason in REFUSALS:
                self.refused[error.reason] += 1
            raise
