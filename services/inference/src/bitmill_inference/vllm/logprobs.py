"""Keeps apart the requests whose log probabilities vLLM cannot tell apart."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from bitmill_inference.requests.sampling import SamplingParams

T = TypeVar("T")


class LogprobKind(enum.Enum):
    """Whose log probabilities a request asks for at each position."""

    LIKELIEST = "likeliest"
    GIVEN = "given"


def logprob_kind(params: SamplingParams) -> LogprobKind | None:
    """The kind that a request asks for; None when it asks for none, or for the chosen token's alone."""
    if params.logprob_token_ids:
        return LogprobKind.GIVEN
    return LogprobKind.LIKELIEST if params.logprobs else None


class LogprobTurns:
    """Lets requests of one kind run at a time, in the order in which they came.

    vLLM's first model runner gathers the tokens of `logprob_token_ids` for all requests of a step as soon as one asks
    for them, and the others get padding in place of their likeliest (`Sampler.forward`).
    """

    def __init__(self) -> None:
        self._kind: LogprobKind | None = None
        self._running = 0
        self._waiting: deque[tuple[LogprobKind, asyncio.Future[None]]] = deque()

    async def take(self, kind: LogprobKind) -> Turn:
        """Waits for the requests of the other kind that came before. The turn is the caller's to release."""
        place = asyncio.get_running_loop().create_future()
        entry = (kind, place)
        self._waiting.append(entry)
        self._admit()
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self._release()
            else:
                # Another's admission may have dropped it already.
                with contextlib.suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise
        return Turn(self._release)

    def _release(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            kind, place = self._waiting[0]
            if place.cancelled():
                # Its task has not had its turn yet to take it away.
                self._waiting.popleft()
                continue
            if self._running and kind is not self._kind:
                return
            self._waiting.popleft()
            self._kind = kind
            self._running += 1
            place.set_result(None)


class Turn:
    """A request's place among those of its kind."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Lets the next ones begin. Releasing twice is no error."""
        release, self._release = self._release, None
        if release is not None:
            release()

    async def outputs(self, outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yields the outputs of the request, and releases the turn when the engine is through with it.

        That may be long before the last output is read: a slow reader holds nobody up.
        """
        read: asyncio.Queue[T | None] = asyncio.Queue()

        async def run() -> None:
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        read.put_nowait(output)
            finally:
                self.release()

        running = asyncio.create_task(run())
        running.add_done_callback(lambda _: read.put_nowait(None))
        try:
            while (output := await read.get()) is not None:
                yield output
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
