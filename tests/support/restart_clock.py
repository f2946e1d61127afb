"""Time for the supervisor of engines, moved by the test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bitmill_inference.models.supervisor import RestartPolicy


@dataclass
class RestartClock:
    """`pauses` has the length of every pause so far. Each lasts until `end_pause`; `paused` gives the next one's."""

    now_s: float = 0
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun: asyncio.Queue[float] = asyncio.Queue()
        self._ends: asyncio.Queue[None] = asyncio.Queue()

    @property
    def policy(self) -> RestartPolicy:
        """The default policy on this clock."""
        return RestartPolicy(clock=lambda: self.now_s, sleep=self._sleep)

    async def paused(self) -> float:
        """Returns the length of the next pause once it has begun."""
        return await asyncio.wait_for(self._begun.get(), 20)

    def end_pause(self) -> None:
        """Ends the pause that runs, or the next one."""
        self._ends.put_nowait(None)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._begun.put_nowait(seconds)
        await self._ends.get()
