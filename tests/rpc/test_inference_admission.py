"""Who is let in: the bound on each caller, the queue's bound, the admission window; and what GetLoad says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from bitmill.inference.v1 import generation_pb2, model_pb2, model_service_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.fake_inference_engine import MAX_NUM_SEQS, TEXT
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving

CALLER_LIMIT = 3
LONG = timedelta(seconds=60)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, caller_limit=CALLER_LIMIT) as running:
        yield running


class Callers:
    """Unary calls that run at the same time."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.calls: list[grpc.aio.UnaryUnaryCall[Any, Any]] = []

    def start(self, caller: str = "a", *, n: int = 1, timeout: float = TIMEOUT_S, request_id: str = "") -> Any:
        request = pb.GenerateUnaryRequest(model="tiny", text="x", sampling_params=generation_pb2.SamplingParams(n=n))
        metadata = (("x-caller-id", caller), *((("x-request-id", request_id),) if request_id else ()))
        self.calls.append(self.server.inference.GenerateUnary(request, metadata=metadata, timeout=timeout))
        return self.calls[-1]

    async def answers(self) -> list[pb.GenerateUnaryResponse]:
        return list(await asyncio.gather(*self.calls))

    async def refusal(self, caller: str = "a", *, n: int = 1) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.start(caller, n=n)
        self.calls.pop()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return caught.value


@pytest.fixture
def callers(server: Serving) -> Callers:
    return Callers(server)


async def load_of(server: Serving, model: str = "tiny") -> model_pb2.ModelLoad:
    request = model_service_pb2.GetLoadRequest(model=model)
    (load,) = (await server.models.GetLoad(request, timeout=TIMEOUT_S)).loads
    return load


async def until_load(server: Serving, **numbers: int) -> model_pb2.ModelLoad:
    """Returns the load once it has these numbers."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            load = await load_of(server)
            if all(getattr(load, name) == number for name, number in numbers.items()):
                return load


class TestCallers:
    async def test_a_caller_over_its_bound_is_refused_at_once(self, server: Serving, callers: Callers) -> None:
        """While its other calls run on; another caller has a bound of its own."""
        await server.load()
        server.engine.gate.clear()
        for _ in range(CALLER_LIMIT):
            callers.start("a")
        await until_load(server, running_requests=CALLER_LIMIT)
        info = error_info(await callers.refusal("a"))
        assert info.reason == "CALLER_LIMIT"
        assert dict(info.metadata) == {"caller": "a", "held": "3", "asked": "1", "limit": "3"}
        callers.start("b")
        await until_load(server, running_requests=CALLER_LIMIT + 1)
        server.engine.gate.set()
        assert len(await callers.answers()) == CALLER_LIMIT + 1

    async def test_a_freed_place_is_usable_at_once(self, server: Serving, callers: Callers) -> None:
        """By whichever way it was freed: an answer, an error, a caller who left."""
        await server.load()
        for _ in range(2 * CALLER_LIMIT):
            await callers.start("a")
        for _ in range(2 * CALLER_LIMIT):
            with pytest.raises(grpc.aio.AioRpcError):
                await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text="x" * 1000), timeout=TIMEOUT_S)
        server.engine.gate.clear()
        for _ in range(2):
            for _ in range(CALLER_LIMIT):
                callers.start("a")
            await until_load(server, running_requests=CALLER_LIMIT)
            for call in callers.calls[-CALLER_LIMIT:]:
                call.cancel()
            await until_load(server, running_requests=0)

    async def test_a_call_counts_each_of_its_sequences(self, server: Serving, callers: Callers) -> None:
        await server.load()
        server.engine.gate.clear()
        callers.start("a", n=2)
        await until_load(server, running_requests=1)
        assert error_info(await callers.refusal("a", n=2)).metadata["held"] == "2"
        callers.start("a")
        await until_load(server, running_requests=2)
        server.engine.gate.set()
        await callers.answers()

    async def test_a_caller_without_a_name_is_known_by_its_host(self, server: Serving) -> None:
        await server.load()
        server.engine.gate.clear()
        request = pb.GenerateUnaryRequest(text="x")
        calls = [server.inference.GenerateUnary(request, timeout=TIMEOUT_S) for _ in range(CALLER_LIMIT)]
        await until_load(server, running_requests=CALLER_LIMIT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.GenerateUnary(request, timeout=TIMEOUT_S)
        assert error_info(caught.value).metadata["caller"] == "127.0.0.1"
        server.engine.gate.set()
        await asyncio.gather(*calls)


class TestQueue:
    async def test_over_the_queues_bound_a_call_is_refused_and_counted(self, server: Serving, callers: Callers) -> None:
        await server.load(max_num_queued_reqs=2)
        server.engine.gate.clear()
        callers.start("a")
        callers.start("b")
        await until_load(server, running_requests=2)
        assert error_info(await callers.refusal("c")).reason == "QUEUE_FULL"
        load = await load_of(server)
        assert (load.refused_calls, load.max_num_queued_reqs) == (1, 2)
        server.engine.gate.set()
        await callers.answers()
        await callers.start("c")

    async def test_a_full_queue_refuses_before_the_window(self, server: Serving, callers: Callers) -> None:
        """Calls that the window holds count for the queue that they will stand in."""
        await server.load(max_num_queued_reqs=4, **window(3))
        server.engine.gate.clear()
        for caller in "abcd":
            callers.start(caller)
        await until_load(server, running_requests=3, waiting_requests=1)
        assert error_info(await callers.refusal("e")).reason == "QUEUE_FULL"
        assert (await load_of(server)).waiting_requests == 1
        server.engine.gate.set()
        await server.unload()
        assert len(await callers.answers()) == 4

    @pytest.mark.parametrize(("held", "asked"), [((2, 2), 1), ((1,), 4), ((1, 2), 2)])
    async def test_a_window_holds_no_more_sequences_than_fit_the_queue(
        self, server: Serving, callers: Callers, held: tuple[int, ...], asked: int
    ) -> None:
        """The queue is full then, and the call not wrong; every sequence counts."""
        await server.load(max_num_queued_reqs=4, **window(4))
        for index, n in enumerate(held):
            callers.start(str(index), n=n)
        await until_load(server, waiting_requests=sum(held))
        assert error_info(await callers.refusal("other", n=asked)).reason == "QUEUE_FULL"
        await server.unload()
        assert len(await callers.answers()) == len(held)


def window(size: int, timeout: timedelta = LONG) -> dict[str, Any]:
    duration = Duration()
    duration.FromTimedelta(timeout)
    return {"min_batch_size": size, "batch_timeout": duration}


class TestWindow:
    async def test_calls_start_together_once_enough_wait(self, server: Serving, callers: Callers) -> None:
        await server.load(**window(3))
        warmed = len(server.engine.requests)
        callers.start("a")
        callers.start("b")
        await until_load(server, waiting_requests=2)
        assert len(server.engine.requests) == warmed
        callers.start("c")
        assert len(await callers.answers()) == 3
        assert (await load_of(server)).waiting_requests == 0

    async def test_the_oldest_waits_no_longer_than_the_timeout(self, server: Serving, callers: Callers) -> None:
        await server.load(**window(3, timedelta(milliseconds=20)))
        assert await callers.start("a")

    @pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
    async def test_a_held_call_that_ends_leaves_at_once_and_never_runs(
        self, server: Serving, callers: Callers, how: str
    ) -> None:
        await server.load(**window(2))
        warmed = len(server.engine.requests)
        call = callers.start("a", timeout=0.3 if how == "deadline" else TIMEOUT_S, request_id="held")
        await until_load(server, waiting_requests=1)
        if how == "cancel":
            call.cancel()
        elif how == "abort":
            answer = await server.inference.Abort(pb.AbortRequest(request_ids=["held"]), timeout=TIMEOUT_S)
            assert answer.aborted_calls == 1
        code = grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED
        assert await call.code() is code
        await until_load(server, waiting_requests=0)
        callers.calls.clear()
        callers.start("b")
        await until_load(server, waiting_requests=1)
        assert len(server.engine.requests) == warmed
        callers.start("c")
        await callers.answers()
        assert len(server.engine.requests) == warmed + 2

    async def test_an_invalid_call_is_not_held(self, server: Serving) -> None:
        await server.load(**window(2))
        request = pb.GenerateUnaryRequest(text="x", sampling_params=generation_pb2.SamplingParams(temperature=-1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.GenerateUnary(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_model_that_drains_lets_its_held_calls_start(self, server: Serving, callers: Callers) -> None:
        await server.load(**window(5))
        callers.start("a")
        await until_load(server, waiting_requests=1)
        await server.unload()
        assert len(await callers.answers()) == 1

    async def test_models_have_windows_of_their_own(self, server: Serving, callers: Callers) -> None:
        await server.load(**window(2))
        callers.start("a")
        await until_load(server, waiting_requests=1)
        await server.load("other")
        await server.inference.GenerateUnary(pb.GenerateUnaryRequest(model="other", text="x"), timeout=TIMEOUT_S)
        assert (await load_of(server)).waiting_requests == 1
        callers.start("b")
        await callers.answers()


class TestLoad:
    async def test_the_numbers_are_the_engines(self, server: Serving, callers: Callers) -> None:
        await server.load(max_num_seqs=1)
        server.engine.gate.clear()
        server.engine.kv_cache_usage = 0.25
        callers.start("a")
        callers.start("b")
        load = await until_load(server, running_requests=1, waiting_requests=1)
        assert load.model == "tiny"
        assert load.state == model_pb2.MODEL_STATE_SERVING
        assert (load.kv_cache_usage, load.max_num_seqs, load.max_num_queued_reqs) == (0.25, 1, 0)
        server.engine.gate.set()
        await callers.answers()
        load = await load_of(server)
        assert (load.running_requests, load.waiting_requests, load.refused_calls) == (0, 0, 0)

    async def test_the_rates_are_those_of_the_last_seconds(self, server: Serving, callers: Callers) -> None:
        await server.load()
        server.load_report.sample()
        await callers.start("a")
        load = await load_of(server)
        assert load.generation_tokens_per_second >= len(TEXT) / 10
        assert load.prompt_tokens_per_second > 0

    async def test_every_model_is_listed_by_name_with_its_state(self, server: Serving) -> None:
        await server.load("b")
        await server.load("a")
        server.engines.gate.clear()
        server.engines.starting.clear()
        loading = asyncio.create_task(server.load("c"))
        await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
        answer = await server.models.GetLoad(model_service_pb2.GetLoadRequest(), timeout=TIMEOUT_S)
        states = [(load.model, load.state) for load in answer.loads]
        serving_state = model_pb2.MODEL_STATE_SERVING
        assert states == [("a", serving_state), ("b", serving_state), ("c", model_pb2.MODEL_STATE_LOADING)]
        assert [load.max_num_seqs for load in answer.loads] == [MAX_NUM_SEQS, MAX_NUM_SEQS, 0]
        assert answer.HasField("time")
        server.engines.gate.set()
        await loading

    async def test_a_model_is_found_by_its_alias(self, server: Serving) -> None:
        await server.load()
        await server.models.SetAlias(model_service_pb2.SetAliasRequest(alias="chat", name="tiny"), timeout=TIMEOUT_S)
        assert (await load_of(server, "chat")).model == "tiny"

    async def test_an_unknown_model_is_not_found(self, server: Serving) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await load_of(server, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
