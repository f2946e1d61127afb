"""Requests for the likeliest tokens and requests for given ones never run together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.vllm.logprobs import LogprobKind, LogprobTurns, logprob_kind

LIKELIEST, GIVEN = LogprobKind.LIKELIEST, LogprobKind.GIVEN


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(), None),
        (SamplingParams(logprobs=0), None),
        (SamplingParams(prompt_logprobs=5), None),
        (SamplingParams(logprobs=1), LIKELIEST),
        (SamplingParams(logprob_token_ids=(1,)), GIVEN),
    ],
)
def test_the_chosen_token_alone_is_no_kind(params: SamplingParams, kind: LogprobKind | None) -> None:
    """It is told right whoever else runs."""
    assert logprob_kind(params) is kind


class Requests:
    """Requests that run until they are told to end, and the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._turns = LogprobTurns()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[list[str]]] = {}

    async def begin(self, name: str, kind: LogprobKind, *, slow: bool = False) -> None:
        """Starts a request; its reader, when slow, takes the first of its two outputs and no more."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, kind, slow))
        await self._settle()

    async def end(self, name: str) -> None:
        """Lets the engine end a request."""
        self._ends[name].set()
        await self._settle()

    async def answer(self, name: str) -> list[str]:
        return await self._tasks[name]

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]})
        await self._settle()

    async def _outputs(self, name: str) -> AsyncGenerator[str, None]:
        self.began.append(name)
        yield "first"
        await self._ends[name].wait()
        if name.startswith("failing"):
            raise ValueError(name)
        yield "last"

    async def _run(self, name: str, kind: LogprobKind, slow: bool) -> list[str]:
        turn = await self._turns.take(kind)
        try:
            async with aclosing(turn.outputs(self._outputs(name))) as outputs:
                if slow:
                    await anext(outputs)
                    await asyncio.Event().wait()
                return [output async for output in outputs]
        finally:
            turn.release()

    @staticmethod
    async def _settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_request_has_its_own_outputs_and_its_own_error() -> None:
    """In order, and whole."""
    requests = Requests()
    for name in ("fine", "failing"):
        await requests.begin(name, LIKELIEST)
        await requests.end(name)
    assert await requests.answer("fine") == ["first", "last"]
    with pytest.raises(ValueError, match="failing"):
        await requests.answer("failing")


async def test_a_slow_reader_holds_nobody_up() -> None:
    """The turn is over when the engine is through."""
    requests = Requests()
    await requests.begin("slow", LIKELIEST, slow=True)
    await requests.begin("given", GIVEN)
    assert requests.began == ["slow"]
    await requests.end("slow")
    assert requests.began == ["slow", "given"]
    await requests.cancel("slow")


async def test_requests_of_one_kind_run_together_and_those_of_the_other_wait() -> None:
    """Whoever comes after one that waits waits behind it, so that each gets its turn."""
    requests = Requests()
    await requests.begin("likeliest 1", LIKELIEST)
    await requests.begin("likeliest 2", LIKELIEST)
    await requests.begin("given", GIVEN)
    await requests.begin("likeliest 3", LIKELIEST)
    assert requests.began == ["likeliest 1", "likeliest 2"]
    await requests.end("likeliest 1")
    assert "given" not in requests.began
    await requests.end("likeliest 2")
    assert requests.began[2:] == ["given"]
    await requests.end("given")
    assert requests.began[3:] == ["likeliest 3"]


async def test_one_that_leaves_while_it_waits_holds_nobody_up() -> None:
    """Nor does one that leaves while it runs."""
    requests = Requests()
    await requests.begin("likeliest 1", LIKELIEST)
    await requests.begin("given 1", GIVEN)
    await requests.begin("likeliest 2", LIKELIEST)
    await requests.cancel("given 1")
    assert requests.began == ["likeliest 1", "likeliest 2"]
    await requests.begin("given 2", GIVEN)
    await requests.cancel("likeliest 1")
    await requests.cancel("likeliest 2")
    assert requests.began[2:] == ["given 2"]


@pytest.mark.parametrize("kind", LogprobKind)
async def test_requests_that_leave_while_others_are_released_take_no_turn(kind: LogprobKind) -> None:
    """Cancelled, but not yet at work on it: the release fails nobody, and those behind them begin."""
    turns = LogprobTurns()
    first = await turns.take(LogprobKind.GIVEN)
    leaving = [asyncio.create_task(turns.take(LogprobKind.LIKELIEST)) for _ in range(3)]
    behind = asyncio.create_task(turns.take(kind))
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    first.release()
    assert [type(each) for each in await asyncio.gather(*leaving, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 3
    (await asyncio.wait_for(behind, 1)).release()
    for other in LogprobKind:
        (await asyncio.wait_for(turns.take(other), 1)).release()
