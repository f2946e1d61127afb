"""One round of a streaming benchmark: that many streams at once, and when their chunks came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

Stream = Callable[[int, int], AsyncIterator[int]]
"""Generates that many tokens on the stream of that number, and yields the number of new tokens as they come."""


@dataclass
class Round:
    """What a round measured. Times in seconds.

    `server_cpu_s`: CPU time of the process that the callers talk to; in process, that is the callers' own.
    `engine_cpu_s`: CPU time of the processes that it started, the engine core. `client_cpu_s`: of the client process.
    """

    tokens: int
    seconds: float
    first_token_s: list[float]
    between_chunks_s: list[float]
    server_cpu_s: float = 0
    engine_cpu_s: float = 0
    client_cpu_s: float = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all streams together."""
        return self.tokens / self.seconds


def prompt_of(stream: int) -> str:
    """A prompt of its own for each stream, about 20 tokens long."""
    return f"Stream {stream} tells a story about the number {stream * 7919} and what became of it:"


async def run_round(stream: Stream, streams: int, tokens: int) -> Round:
    """Runs the streams, which begin together."""
    firsts: list[float] = []
    gaps: list[float] = []

    async def consume(index: int) -> int:
        previous = time.perf_counter()
        count = chunks = 0
        async for new in stream(index, tokens):
            now = time.perf_counter()
            (gaps if chunks else firsts).append(now - previous)
            previous = now
            chunks += 1
            count += new
        return count

    start, cpu_start = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(consume(index) for index in range(streams)))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    if counts != [tokens] * streams:
        raise RuntimeError(f"asked for {tokens} tokens on each stream, got {counts}")
    return Round(sum(counts), seconds, firsts, gaps, client_cpu_s=cpu_seconds)


def percentile_ms(values: Sequence[float], percent: float) -> float | None:
    """Nearest-rank percentile in milliseconds; None of no values."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 3) if ordered else None
