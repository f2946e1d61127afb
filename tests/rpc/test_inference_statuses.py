"""Every status of the inference service, on streaming calls and unary ones: the same code, message and details."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from bitmill.inference.v1 import generation_pb2, model_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common import errors
from support.inference_serving import TIMEOUT_S, Serving, serving

REQUEST_ID = (("x-request-id", "the-call"),)
TEXT = {"text": "hello"}
MESSAGES = {"messages": [generation_pb2.ChatMessage(role="user", content="hello")]}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Generate": (pb.GenerateRequest, TEXT),
    "GenerateUnary": (pb.GenerateUnaryRequest, TEXT),
    "Chat": (pb.ChatRequest, MESSAGES),
    "ChatUnary": (pb.ChatUnaryRequest, MESSAGES),
}


@dataclass(frozen=True)
class Outcome:
    """How a call failed."""

    code: grpc.StatusCode
    message: str
    status: status_pb2.Status

    def detail(self, message: Any) -> Any:
        """The one detail of that type."""
        (found,) = [packed for packed in self.status.details if packed.Is(message.DESCRIPTOR)]
        found.Unpack(message)
        return message

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        return self.detail(error_details_pb2.ErrorInfo())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as running:
        await running.load()
        yield running


async def failure(server: Serving, method: str, *, received: int = 0, **fields: Any) -> Outcome:
    """Calls and returns how the call failed after that many responses."""
    kind, base = METHODS[method]
    call = getattr(server.inference, method)(kind(**base | fields), metadata=REQUEST_ID, timeout=TIMEOUT_S)
    counts = itertools.count()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if method.endswith("Unary") else count(call, counts))
    assert next(counts) == received
    error = caught.value
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    return Outcome(error.code(), error.details() or "", status)


async def count(stream: AsyncIterable[Any], counts: Iterator[int]) -> None:
    """Takes the next number for each response."""
    async for _ in stream:
        next(counts)


async def failures(server: Serving, **fields: Any) -> Outcome:
    """How every method fails, which is the same way."""
    outcomes = [await failure(server, method, **fields) for method in METHODS]
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0]


ENGINE_ERRORS = [
    (errors.NotFoundError("ADAPTER_NOT_FOUND", "no adapter", {"key": "value"}), grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError("TAKEN", "the id is taken"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.PermissionDeniedError("OUTSIDE", "not allowed"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.FailedPreconditionError("TASK", "does not do that"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ResourceExhaustedError("TOO_LARGE", "40 is more than 32"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnavailableError("QUEUE_FULL", "full"), grpc.StatusCode.UNAVAILABLE),
    (errors.DataLossError("CORRUPT", "bytes differ"), grpc.StatusCode.DATA_LOSS),
    (errors.DeadlineExceededError("LATE", "took too long"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.CancelledError("GIVEN_UP", "given up"), grpc.StatusCode.CANCELLED),
    (errors.InternalError("BROKEN", "a part failed"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), ENGINE_ERRORS, ids=lambda value: getattr(value, "name", ""))
async def test_each_error_of_the_engine_has_its_status_on_every_call(
    server: Serving, error: errors.BitmillError, code: grpc.StatusCode
) -> None:
    server.engine.failure = error
    outcome = await failures(server)
    assert (outcome.code, outcome.message) == (code, error.message)
    assert (outcome.info.reason, outcome.info.domain) == (error.reason, "bitmill")
    assert dict(outcome.info.metadata) == error.metadata


@pytest.mark.parametrize(("error", "code"), ENGINE_ERRORS, ids=lambda value: getattr(value, "name", ""))
async def test_an_error_in_the_middle_has_the_same_status(
    server: Serving, error: errors.BitmillError, code: grpc.StatusCode
) -> None:
    """What a stream has sent before it arrives; a unary call gives nothing."""
    server.engine.later_failure = error
    streamed, chatted = await failure(server, "Generate", received=1), await failure(server, "Chat", received=1)
    unary, chatted_unary = await failure(server, "GenerateUnary"), await failure(server, "ChatUnary")
    assert streamed == chatted == unary == chatted_unary
    assert (streamed.code, streamed.message, streamed.info.reason) == (code, error.message, error.reason)


@pytest.mark.parametrize("moment", ["failure", "later_failure"])
async def test_an_unknown_failure_is_internal_with_the_id_that_the_log_carries(server: Serving, moment: str) -> None:
    """Nothing of the failure itself reaches the caller."""
    setattr(server.engine, moment, RuntimeError("a secret path"))
    received = {"failure": 0, "later_failure": 1}[moment]
    streamed, unary = await failure(server, "Generate", received=received), await failure(server, "GenerateUnary")
    assert streamed == unary
    assert streamed.code is grpc.StatusCode.INTERNAL
    assert "secret" not in str(streamed)
    assert dict(streamed.info.metadata) == {"request_id": "the-call"}


async def test_invalid_arguments_name_every_wrong_field_by_its_path(server: Serving) -> None:
    wrong = generation_pb2.SamplingParams(temperature=-1, top_p=3, max_tokens=0)
    outcome = await failures(server, sampling_params=wrong)
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = outcome.detail(error_details_pb2.BadRequest())
    fields = {violation.field for violation in bad_request.field_violations}
    assert fields == {f"sampling_params.{name}" for name in ("temperature", "top_p", "max_tokens")}
    assert all(violation.description and violation.reason for violation in bad_request.field_violations)


async def test_an_unknown_model_is_not_found(server: Serving) -> None:
    outcome = await failures(server, model="other")
    assert (outcome.code, outcome.info.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert dict(outcome.info.metadata) == {"model": "other"}


async def test_a_model_that_loads_is_unavailable_and_says_when_to_try_again(server: Serving) -> None:
    server.engines.gate.clear()
    server.engines.starting.clear()
    loading = asyncio.create_task(server.load("second"))
    await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
    outcome = await failures(server, model="second")
    assert (outcome.code, outcome.info.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
    assert outcome.detail(error_details_pb2.RetryInfo()).retry_delay.ToTimedelta() > timedelta(0)
    server.engines.gate.set()
    await loading


async def test_a_full_queue_is_unavailable_and_says_when_to_try_again(server: Serving) -> None:
    server.engine.failure = errors.UnavailableError("QUEUE_FULL", "full", retry_after=timedelta(seconds=2.5))
    outcome = await failures(server)
    assert outcome.detail(error_details_pb2.RetryInfo()).retry_delay.ToTimedelta() == timedelta(seconds=2.5)


async def test_an_exhausted_resource_names_the_quota(server: Serving) -> None:
    server.engine.failure = errors.ResourceExhaustedError("TOO_LARGE", "40 is more than 32")
    (violation,) = (await failures(server)).detail(error_details_pb2.QuotaFailure()).violations
    assert (violation.subject, violation.description) == ("TOO_LARGE", "40 is more than 32")


@pytest.mark.parametrize("method", METHODS)
async def test_a_deadline_ends_every_call_and_its_work(server: Serving, method: str) -> None:
    server.engine.gate.clear()
    kind, fields = METHODS[method]
    call = getattr(server.inference, method)(kind(**fields), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call if method.endswith("Unary") else [response async for response in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)


@pytest.mark.parametrize("method", METHODS)
async def test_a_cancelled_call_ends_its_work(server: Serving, method: str) -> None:
    server.engine.gate.clear()
    kind, fields = METHODS[method]
    call = getattr(server.inference, method)(kind(**fields), timeout=TIMEOUT_S)
    reading = asyncio.ensure_future(call if method.endswith("Unary") else anext(aiter(call)))
    await asyncio.wait_for(server.engine.busy.wait(), TIMEOUT_S)
    call.cancel()
    await asyncio.wait({reading})
    assert await call.code() is grpc.StatusCode.CANCELLED
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)


async def test_the_model_of_a_refused_call_serves_on(server: Serving) -> None:
    server.engine.failure = errors.InternalError("BROKEN", "a part failed")
    await failures(server)
    server.engine.failure = None
    assert (await server.inference.GenerateUnary(pb.GenerateUnaryRequest(**TEXT), timeout=TIMEOUT_S)).sequences
    assert (await server.get()).state == model_pb2.MODEL_STATE_SERVING
