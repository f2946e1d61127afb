"""Keeps a model's engine alive: one that dies is started again, after a pause that doubles with each death in a row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog

from bitmill_common.errors import BitmillError, InternalError, UnavailableError
from bitmill_inference.models.model import ModelState
from bitmill_inference.models.model_entry import ModelEntry, model_error, now
from bitmill_inference.ports import Engine

log = structlog.get_logger("bitmill.models")


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine is started again. Seconds.

    The first pause is `initial_s`; each start that fails, or serves for less than `reset_after_s`, doubles the next one
    up to `max_s`. `clock` and `sleep` are the time.
    """

    initial_s: float = 1
    max_s: float = 60
    reset_after_s: float = 300
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Supervisor:
    """Watches over the engine of one entry that serves. `start_engine` gives the entry a new one, or raises."""

    def __init__(
        self, entry: ModelEntry, start_engine: Callable[[ModelEntry], Awaitable[None]], policy: RestartPolicy
    ) -> None:
        self._entry = entry
        self._start_engine = start_engine
        self._policy = policy

    async def run(self) -> None:
        """Restarts the engine whenever it dies, until it is cancelled."""
        # The load's call has ended; the log lines from here on are nobody's.
        structlog.contextvars.clear_contextvars()
        pause = self._policy.initial_s
        while True:
            began = self._policy.clock()
            failure: BitmillError | None = await self._end_of_engine()
            if self._policy.clock() - began >= self._policy.reset_after_s:
                pause = self._policy.initial_s
            await self._end_switch()
            # Of the engine that has ended: whoever could condemn it has ended too.
            self._entry.acquit()
            restarts = self._entry.model.restarts + 1
            while failure is not None:
                await self._pause(failure, pause, restarts)
                pause = min(2 * pause, self._policy.max_s)
                failure = await self._start()

    async def _end_of_engine(self) -> BitmillError:
        if self._entry.engine is None:
            raise AssertionError("a model that serves has an engine")
        dying = asyncio.create_task(self._die(self._entry.engine))
        condemned = asyncio.create_task(self._entry.condemnation())
        try:
            done, _ = await asyncio.wait({dying, condemned}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
            condemned.cancel()
        return done.pop().result()

    @staticmethod
    async def _die(engine: Engine) -> BitmillError:
        await engine.died()
        return UnavailableError("ENGINE_DIED", "the engine of this model has died")

    async def _end_switch(self) -> None:
        # Whoever waited for one may have begun another.
        while self._entry.switching is not None and not self._entry.switching.done():
            self._entry.switching.cancel()
            await asyncio.wait({self._entry.switching})

    async def _pause(self, failure: BitmillError, seconds: float, restarts: int) -> None:
        entry = self._entry
        log.error("model_restarting", model=entry.name, reason=failure.reason, message=failure.message, pause_s=seconds)
        await entry.enter(
            ModelState.RESTARTING,
            error=model_error(failure),
            restart_time=now() + timedelta(seconds=seconds),
            restarts=restarts,
        )
        await asyncio.gather(entry.stop_engine(), self._policy.sleep(seconds))

    async def _start(self) -> BitmillError | None:
        entry = self._entry
        try:
            await self._start_engine(entry)
        except BitmillError as error:
            return error
        except Exception as error:
            log.error("model_restart_crashed", model=entry.name, exc_info=error)
            return InternalError("RESTART_CRASHED", "the restart failed; the server's log has it")
        await entry.enter(ModelState.SERVING, serving_time=now())
        log.info("model_restarted", model=entry.name, restarts=entry.model.restarts)
        return None
