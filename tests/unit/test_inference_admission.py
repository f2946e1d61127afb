"""Who may start: the bound on each caller and the window that lets calls start together."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest

from bitmill_common.errors import NotFoundError, UnavailableError
from bitmill_inference.requests.admission import AdmissionWindow, Callers, ModelAdmission

TIMEOUT_S = 20
HOUR_S = 3600.0
MOMENT_S = 0.005


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)


class TestCallers:
    def test_a_caller_over_its_bound_is_refused_with_the_numbers(self) -> None:
        callers = Callers(4)
        with callers.place("a", 3), pytest.raises(UnavailableError) as caught, callers.place("a", 2):
            pass
        assert caught.value.reason == "CALLER_LIMIT"
        assert caught.value.metadata == {"caller": "a", "held": "3", "asked": "2", "limit": "4"}
        assert caught.value.retry_after > timedelta(0)

    def test_the_bound_itself_is_allowed(self) -> None:
        callers = Callers(2)
        with callers.place("a"), callers.place("a"), pytest.raises(UnavailableError), callers.place("a"):
            pass

    def test_callers_do_not_share_a_bound(self) -> None:
        callers = Callers(1)
        with callers.place("a"), callers.place("b"), callers.place(""):
            pass

    def test_a_freed_place_is_usable_at_once(self) -> None:
        callers = Callers(1)
        for _ in range(3):
            with callers.place("a"):
                pass

    def test_a_refused_call_takes_no_place(self) -> None:
        callers = Callers(2)
        with callers.place("a"):
            with pytest.raises(UnavailableError), callers.place("a", 2):
                pass
            with callers.place("a"):
                pass

    def test_a_call_that_fails_gives_its_places_back(self) -> None:
        callers = Callers(1)
        with contextlib.suppress(RuntimeError), callers.place("a"):
            raise RuntimeError
        with callers.place("a"):
            pass

    def test_a_call_larger_than_the_bound_runs_alone(self) -> None:
        callers = Callers(2)
        with callers.place("a", 5), pytest.raises(UnavailableError), callers.place("a"):
            pass
        with callers.place("a"), pytest.raises(UnavailableError), callers.place("a", 5):
            pass


class Waiting:
    """Calls before a window; `started` has the numbers of those that it let through, in order."""

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window
        self.started: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, count: int = 1) -> None:
        """Lets calls come and waits until they are held or through."""
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._call(len(self.tasks))))
        await settle()

    async def _call(self, number: int) -> None:
        await self.window.wait()
        self.started.append(number)

    async def all_started(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), TIMEOUT_S)


class TestWindow:
    async def test_calls_start_together_once_enough_wait(self) -> None:
        waiting = Waiting(AdmissionWindow(3, HOUR_S))
        await waiting.add(2)
        assert (waiting.started, waiting.window.num_held) == ([], 2)
        await waiting.add()
        assert sorted(waiting.started) == [0, 1, 2]
        assert waiting.window.num_held == 0

    async def test_the_next_batch_is_held_again(self) -> None:
        waiting = Waiting(AdmissionWindow(2, HOUR_S))
        await waiting.add(5)
        assert len(waiting.started) == 4
        assert waiting.window.num_held == 1

    async def test_the_oldest_waits_no_longer_than_the_timeout(self) -> None:
        """Those that came after it start with it."""
        waiting = Waiting(AdmissionWindow(10, MOMENT_S))
        await waiting.add(3)
        await waiting.all_started()
        assert waiting.window.num_held == 0
        await waiting.add()
        await waiting.all_started()

    @pytest.mark.parametrize("size", [0, 1])
    async def test_without_a_batch_size_nothing_is_held(self, size: int) -> None:
        """Not even for one turn of the event loop."""
        window = AdmissionWindow(size, 0)
        with pytest.raises(StopIteration):
            window.wait().send(None)

    async def test_a_cancelled_call_leaves_at_once_and_never_runs(self) -> None:
        """And it does not count for the batch any more."""
        waiting = Waiting(AdmissionWindow(2, HOUR_S))
        await waiting.add()
        waiting.tasks[0].cancel()
        await settle()
        assert waiting.window.num_held == 0
        await waiting.add()
        assert waiting.started == []
        await waiting.add()
        assert sorted(waiting.started) == [1, 2]

    async def test_a_call_cancelled_as_the_window_opens_never_runs(self) -> None:
        waiting = Waiting(AdmissionWindow(2, HOUR_S))
        await waiting.add()
        waiting.window.release()
        waiting.tasks[0].cancel()
        await settle()
        assert waiting.tasks[0].cancelled()
        assert waiting.started == []

    async def test_when_the_oldest_leaves_the_next_is_the_oldest(self) -> None:
        """Its own timeout counts, and it does not wait for ever."""
        waiting = Waiting(AdmissionWindow(10, MOMENT_S))
        await waiting.add(2)
        waiting.tasks.pop(0).cancel()
        await waiting.all_started()
        assert waiting.started == [1]

    async def test_released_calls_start_whatever_their_number(self) -> None:
        waiting = Waiting(AdmissionWindow(10, HOUR_S))
        await waiting.add(2)
        waiting.window.release()
        await waiting.all_started()

    async def test_a_deadline_in_the_window_ends_the_call(self) -> None:
        window = AdmissionWindow(2, HOUR_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(window.wait(), 0.01)
        assert window.num_held == 0


def test_refusals_are_counted_by_reason_and_other_errors_are_not() -> None:
    admission = ModelAdmission()
    errors = [
        UnavailableError("QUEUE_FULL", ""),
        UnavailableError("QUEUE_FULL", ""),
        UnavailableError("CALLER_LIMIT", ""),
        UnavailableError("ENGINE_DIED", ""),
        NotFoundError("QUEUE_FULL", ""),
    ]
    for error in errors:
        with contextlib.suppress(UnavailableError, NotFoundError), admission.counting():
            raise error
    assert admission.refused == {"QUEUE_FULL": 2, "CALLER_LIMIT": 1}
