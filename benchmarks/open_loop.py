"""Calls that come whatever the server does, an open loop with exponential gaps; a closed loop; what each call saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from streaming_round import percentile_ms

from bitmill.inference.v1 import generation_pb2, inference_service_pb2, inference_service_pb2_grpc


@dataclass
class Call:
    """One call. Times in seconds from its start; `tokens_at` has those of the chunks."""

    refused: bool = False
    seconds: float = 0
    tokens: int = 0
    tokens_at: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Times between chunks."""
        return [after - before for before, after in zip(self.tokens_at, self.tokens_at[1:], strict=False)]


class Caller:
    """Streams generations of `tokens` tokens of a model, each with a prompt of its own of `prompt_words` words."""

    def __init__(
        self, stub: inference_service_pb2_grpc.InferenceServiceStub, model: str, tokens: int, prompt_words: int
    ) -> None:
        self._stub = stub
        self._model = model
        self._params = generation_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._words = prompt_words
        self._number = 0

    async def call(self) -> Call:
        """Makes one call, which UNAVAILABLE refuses and any other error ends the benchmark."""
        self._number += 1
        text = " ".join(f"{self._number * 7919 + word}" for word in range(self._words))
        request = inference_service_pb2.GenerateRequest(model=self._model, text=text, sampling_params=self._params)
        made = Call()
        start = time.perf_counter()
        try:
            async for response in self._stub.Generate(request):
                made.tokens_at.append(time.perf_counter() - start)
                made.tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            made.refused = True
        made.seconds = time.perf_counter() - start
        return made


async def closed_loop(caller: Caller, callers: int, seconds: float) -> tuple[list[Call], float]:
    """That many callers, each with the next call as soon as the last has ended; the calls and the seconds they took."""
    start = time.perf_counter()
    calls: list[Call] = []

    async def repeat() -> None:
        while time.perf_counter() - start < seconds:
            calls.append(await caller.call())

    await asyncio.gather(*(repeat() for _ in range(callers)))
    return calls, time.perf_counter() - start


async def open_loop(caller: Caller, per_s: float, seconds: float, seed: int = 0) -> tuple[list[Call], float]:
    """Calls at that mean rate; the calls, once all have ended, and the seconds in which they came."""
    gaps = random.Random(seed)
    start = time.perf_counter()
    due = start
    tasks = []
    while due - start < seconds:
        due += gaps.expovariate(per_s)
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(caller.call()))
    came = time.perf_counter() - start
    return list(await asyncio.gather(*tasks)), came


def percentiles_ms(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The median, the 99th percentile and the largest, in milliseconds."""
    return {f"{name}_ms_p{percent}": percentile_ms(values, percent) for percent in (50, 99, 100)}


def summary(calls: Sequence[Call], seconds: float) -> dict[str, Any]:
    """What the calls that came in that many seconds saw."""
    accepted = [call for call in calls if not call.refused]
    return {
        "calls": len(calls),
        "accepted": len(accepted),
        "refused": len(calls) - len(accepted),
        "offered_per_s": round(len(calls) / seconds, 1),
        "accepted_per_s": round(len(accepted) / seconds, 1),
        "tokens_per_s": round(sum(call.tokens for call in accepted) / seconds, 1),
        **percentiles_ms("accepted", [call.seconds for call in accepted]),
        **percentiles_ms("ttft", [call.tokens_at[0] for call in accepted if call.tokens_at]),
        **percentiles_ms("itl", [gap for call in accepted for gap in call.gaps]),
        **percentiles_ms("refusal", [call.seconds for call in calls if call.refused]),
    }
