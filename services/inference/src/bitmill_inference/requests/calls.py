"""The calls that run, by the ids that their callers know, and what ends one before its time: Abort."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Iterator

from bitmill_common.errors import CancelledError
from bitmill_inference.ports import Engine

MAX_ABORTED_IDS = 1024


class Call:
    """A call that runs in the current task."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._engine_id = ""
        self._task = asyncio.current_task()
        self._cancelled = False
        self._ended = False

    def enter(self, engine: Engine) -> str:
        """Says which engine works on the call from now on, and returns the id that the call has there."""
        self._engine, self._engine_id = engine, uuid.uuid4().hex
        return self._engine_id

    async def abort(self) -> None:
        """Lets the engine end the call with what it has, or cancels the call while it has nothing."""
        if self._engine is not None and await self._engine.abort(self._engine_id):
            return
        if self._task is not None and not self._cancelled and not self._ended:
            self._cancelled = True
            self._task.cancel()

    @contextlib.contextmanager
    def abortable(self) -> Iterator[None]:
        """Turns this call's own cancellation, and no other, into `CancelledError` REQUEST_ABORTED."""
        try:
            yield
        except asyncio.CancelledError as error:
            if self._cancelled and self._task is not None and not self._task.uncancel():
                raise CancelledError("REQUEST_ABORTED", "the request was aborted before it began") from error
            raise
        finally:
            self._ended = True


class Calls:
    """The calls that run, by the ids that their callers know; several may have one id."""

    def __init__(self) -> None:
        self._running: dict[str, set[Call]] = {}

    @contextlib.contextmanager
    def running(self, request_id: str) -> Iterator[Call]:
        """Holds a call of the current task for `abort`. Raises `CancelledError` when it is aborted with nothing."""
        call = Call()
        self._running.setdefault(request_id, set()).add(call)
        try:
            with call.abortable():
                yield call
        finally:
            same_id = self._running[request_id]
            same_id.discard(call)
            if not same_id:
                del self._running[request_id]

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends every running call that has one of the ids, and returns how many there were."""
        calls = [call for request_id in set(request_ids) for call in self._running.get(request_id, ())]
        for call in calls:
            await call.abort()
        return len(calls)
