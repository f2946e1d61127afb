"""What every call of both servers gets: statuses, request ids, logs, health, reflection, a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from bitmill.quantizer.v1 import quantizer_service_pb2 as pb
from bitmill.quantizer.v1 import quantizer_service_pb2_grpc as pb_grpc
from bitmill_common import errors
from bitmill_common.interceptors import CallObserver, current_request_id
from bitmill_common.server import Binding, GrpcServer

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["QuantizerService"]

Act = Callable[[str], Awaitable[None]]


class ActingServicer(pb_grpc.QuantizerServiceServicer):
    """Does what the test says and answers with the request id; `cleaned_up` is set when its stream has ended."""

    def __init__(self) -> None:
        self.act: Act | None = None
        self.abort_with: tuple[grpc.StatusCode, str] | None = None
        self.cleaned_up = asyncio.Event()

    async def GetQuantizationJob(self, request: Any, context: Any) -> pb.GetQuantizationJobResponse:  # noqa: N802
        if self.abort_with:
            await context.abort(*self.abort_with)
        if self.act:
            await self.act(request.job_id)
        return pb.GetQuantizationJobResponse(job={"job_id": current_request_id()})

    async def WatchQuantizationJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            yield pb.WatchQuantizationJobResponse(event={"job": {"job_id": current_request_id()}})
            if self.abort_with:
                await context.abort(*self.abort_with)
            if self.act:
                await self.act(request.job_id)
        finally:
            self.cleaned_up.set()


class Served:
    """A running server and a channel to it."""

    def __init__(self, server: GrpcServer, servicer: ActingServicer, channel: grpc.aio.Channel, port: int) -> None:
        self.server = server
        self.servicer = servicer
        self.channel = channel
        self.port = port
        self.stub = pb_grpc.QuantizerServiceStub(channel)

    async def call(self, kind: str, **options: Any) -> tuple[Any, grpc.aio.Metadata]:
        """Makes a unary or a streaming call; returns the first response and the trailers."""
        if kind == "unary":
            call = self.stub.GetQuantizationJob(pb.GetQuantizationJobRequest(), **options)
            return await call, await call.trailing_metadata()
        call = self.stub.WatchQuantizationJob(pb.WatchQuantizationJobRequest(), **options)
        responses = [response async for response in call]
        return responses[0], await call.trailing_metadata()

    async def failure(self, kind: str, act: Act, **options: Any) -> grpc.aio.AioRpcError:
        self.servicer.act = act
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(kind, **options)
        return caught.value


@asynccontextmanager
async def serving(observer: CallObserver = lambda method, code, seconds: None) -> AsyncIterator[Served]:
    servicer = ActingServicer()
    bindings = [Binding(DESCRIPTOR, partial(pb_grpc.add_QuantizerServiceServicer_to_server, servicer))]
    server = GrpcServer(bindings, observer=observer)
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(server, servicer, channel, port)
    finally:
        await server.stop(timedelta(0))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


@pytest.fixture(params=["unary", "stream"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def logged() -> Any:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        yield lines


def raising(error: BaseException) -> Act:
    async def act(_: str) -> None:
        raise error

    return act


def hanging(reached: asyncio.Event, release: asyncio.Event) -> Act:
    async def act(_: str) -> None:
        reached.set()
        await release.wait()

    return act


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """Returns the status in the trailers, which must say what the call's own code and text say."""
    status = status_pb2.Status.FromString(error.trailing_metadata()["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    return status


def detail(status: status_pb2.Status, message: Any) -> Any:
    (found,) = [packed for packed in status.details if packed.Is(message.DESCRIPTOR)]
    found.Unpack(message)
    return message


async def health_of(served: Served, service: str = "") -> AsyncIterator[int]:
    """Yields the health of the server, or of one name, at each change."""
    request = health_pb2.HealthCheckRequest(service=service)
    async for response in health_pb2_grpc.HealthStub(served.channel).Watch(request):
        yield response.status


SIMPLE_ERRORS = [
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.FailedPreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ResourceExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
    (errors.DeadlineExceededError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.CancelledError, grpc.StatusCode.CANCELLED),
    (errors.InternalError, grpc.StatusCode.INTERNAL),
]


class TestStatuses:
    @pytest.mark.parametrize(("error_type", "code"), SIMPLE_ERRORS)
    async def test_each_domain_error_has_its_code_reason_and_metadata(
        self, served: Served, kind: str, error_type: type[errors.BitmillError], code: grpc.StatusCode
    ) -> None:
        error = await served.failure(kind, raising(error_type("SOME_REASON", "what is wrong", {"key": "value"})))
        assert (error.code(), error.details()) == (code, "what is wrong")
        info = detail(status_of(error), error_details_pb2.ErrorInfo())
        assert (info.reason, info.domain, dict(info.metadata)) == ("SOME_REASON", "bitmill", {"key": "value"})

    async def test_invalid_arguments_name_every_field(self, served: Served, kind: str) -> None:
        violations = [errors.FieldViolation("a.b", "too big", "TOO_BIG"), errors.FieldViolation("c", "missing")]
        error = await served.failure(kind, raising(errors.InvalidArgumentError(violations)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad_request = detail(status_of(error), error_details_pb2.BadRequest())
        sent = [(v.field, v.description, v.reason) for v in bad_request.field_violations]
        assert sent == [("a.b", "too big", "TOO_BIG"), ("c", "missing", "INVALID_FIELD")]

    async def test_unavailable_says_when_to_try_again(self, served: Served, kind: str) -> None:
        unavailable = errors.UnavailableError("QUEUE_FULL", "full", retry_after=timedelta(seconds=1.5))
        retry = detail(status_of(await served.failure(kind, raising(unavailable))), error_details_pb2.RetryInfo())
        assert retry.retry_delay.ToTimedelta() == timedelta(seconds=1.5)

    @pytest.mark.parametrize(("seconds", "pushback"), [(0, "0"), (1.5, "1500"), (5, "5000"), (6, "-1")])
    async def test_unavailable_tells_grpc_when_to_send_the_call_again(
        self, served: Served, kind: str, seconds: float, pushback: str
    ) -> None:
        """Not at all where the wait is long: a refusal says more than a deadline that passes in silence."""
        unavailable = errors.UnavailableError("QUEUE_FULL", "full", retry_after=timedelta(seconds=seconds))
        error = await served.failure(kind, raising(unavailable))
        assert error.trailing_metadata()["grpc-retry-pushback-ms"] == pushback

    async def test_an_exhausted_resource_names_the_quota(self, served: Served, kind: str) -> None:
        exhausted = errors.ResourceExhaustedError("TOO_LARGE", "40 MiB is more than 32 MiB")
        quota = detail(status_of(await served.failure(kind, raising(exhausted))), error_details_pb2.QuotaFailure())
        assert [violation.subject for violation in quota.violations] == ["TOO_LARGE"]

    async def test_a_subclass_has_the_code_of_its_parent(self, served: Served, kind: str) -> None:
        class NoSuchShardError(errors.NotFoundError):
            pass

        error = await served.failure(kind, raising(NoSuchShardError("SHARD_MISSING", "gone")))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    @pytest.mark.parametrize("unknown", [RuntimeError("secret path"), asyncio.CancelledError(), KeyError("x")])
    async def test_an_unknown_failure_is_internal_with_a_fixed_text(
        self, served: Served, kind: str, unknown: BaseException, logged: list[Any]
    ) -> None:
        """Also a cancellation that is not the call's own: nobody else would answer it."""
        error = await served.failure(kind, raising(unknown), metadata=(("x-request-id", "r1"),), timeout=20)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "internal error; the server's log has it by request id"
        assert detail(status_of(error), error_details_pb2.ErrorInfo()).metadata["request_id"] == "r1"
        (failed,) = [line for line in logged if line["event"] == "call_failed"]
        assert (failed["exc_info"], failed["request_id"]) == (unknown, "r1")

    async def test_a_servicer_that_ends_its_call_itself_keeps_its_status(
        self, served: Served, kind: str, logged: list[Any]
    ) -> None:
        """Servicers of other packages do; the call is logged with that status, once, and has the request id."""
        served.servicer.abort_with = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
        error = await served.failure(kind, raising(AssertionError("not reached")), metadata=(("x-request-id", "r1"),))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
        assert dict(error.trailing_metadata()) == {"x-request-id": "r1"}
        assert [(line["event"], line["code"], line["message"]) for line in logged] == [
            ("call_finished", "RESOURCE_EXHAUSTED", "no more")
        ]

    @pytest.mark.parametrize("character", ["x", "ü", "漢", "😀", "%", "\n", "\udcff"])
    async def test_long_texts_are_cut_and_still_arrive(self, served: Served, kind: str, character: str) -> None:
        """Whatever the characters take on the wire, the status stays below what peers accept."""
        metadata = {f"key{n}": character * 5000 for n in range(40)}
        error = await served.failure(kind, raising(errors.DataLossError("CORRUPT", character * 50_000, metadata)))
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert error.details().endswith("…")
        assert detail(status_of(error), error_details_pb2.ErrorInfo()).metadata

    async def test_many_long_violations_still_arrive(self, served: Served, kind: str) -> None:
        violations = [errors.FieldViolation(f"field[{n}]", "漢" * 2000) for n in range(500)]
        error = await served.failure(kind, raising(errors.InvalidArgumentError(violations)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert detail(status_of(error), error_details_pb2.BadRequest()).field_violations[0].field == "field[0]"

    async def test_what_a_stream_sent_before_its_error_arrives(self, served: Served) -> None:
        served.servicer.act = raising(errors.InternalError("ENGINE_DEAD", "died"))
        call = served.stub.WatchQuantizationJob(pb.WatchQuantizationJobRequest())
        assert (await anext(aiter(call))).event.job.job_id
        assert await call.code() is grpc.StatusCode.INTERNAL


class TestRequestIds:
    async def test_the_callers_id_is_the_one_everywhere(self, served: Served, kind: str, logged: list[Any]) -> None:
        response, trailers = await served.call(kind, metadata=(("x-request-id", "mine"),))
        seen = response.job.job_id if kind == "unary" else response.event.job.job_id
        assert seen == trailers["x-request-id"] == "mine"
        (finished,) = [line for line in logged if line["event"] == "call_finished"]
        assert (finished["request_id"], finished["code"]) == ("mine", "OK")
        assert finished["method"].endswith("/GetQuantizationJob" if kind == "unary" else "/WatchQuantizationJob")

    async def test_a_call_without_one_gets_one(self, served: Served, kind: str) -> None:
        ids = {(await served.call(kind))[1]["x-request-id"] for _ in range(2)}
        assert len(ids) == 2

    async def test_an_error_carries_it_too(self, served: Served, kind: str, logged: list[Any]) -> None:
        error = await served.failure(
            kind, raising(errors.NotFoundError("GONE", "gone")), metadata=(("x-request-id", "mine"),)
        )
        assert error.trailing_metadata()["x-request-id"] == "mine"
        (finished,) = [line for line in logged if line["event"] == "call_finished"]
        assert (finished["code"], finished["reason"], finished["message"]) == ("NOT_FOUND", "GONE", "gone")

    async def test_of_a_long_error_the_log_has_the_beginning(
        self, served: Served, kind: str, logged: list[Any]
    ) -> None:
        """However many fields of a request are wrong."""
        await served.failure(kind, raising(errors.NotFoundError("GONE", "gone" * 100_000)))
        (finished,) = [line for line in logged if line["event"] == "call_finished"]
        assert finished["message"] == "gone" * 1024

    async def test_a_long_one_is_cut(self, served: Served, kind: str) -> None:
        _, trailers = await served.call(kind, metadata=(("x-request-id", "x" * 1000),))
        assert trailers["x-request-id"] == "x" * 128


class TestObserver:
    async def test_it_is_told_of_each_call_once_with_its_code_and_duration(self, kind: str) -> None:
        told: list[tuple[str, grpc.StatusCode, float]] = []
        async with serving(lambda *call: told.append(call)) as served:
            await served.call(kind)
            await served.failure(kind, raising(errors.NotFoundError("GONE", "gone")))
            await served.failure(kind, raising(RuntimeError("unknown")))
        assert [code for _, code, _ in told] == [
            grpc.StatusCode.OK,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INTERNAL,
        ]
        name = "GetQuantizationJob" if kind == "unary" else "WatchQuantizationJob"
        assert {method for method, _, _ in told} == {f"/{DESCRIPTOR.full_name}/{name}"}
        assert all(seconds > 0 for _, _, seconds in told)

    async def test_a_caller_that_leaves_is_told_as_cancelled(self, kind: str) -> None:
        told: asyncio.Queue[grpc.StatusCode] = asyncio.Queue()
        reached = asyncio.Event()
        async with serving(lambda method, code, seconds: told.put_nowait(code)) as served:
            served.servicer.act = hanging(reached, asyncio.Event())
            calling = asyncio.create_task(served.call(kind))
            await asyncio.wait_for(reached.wait(), 20)
            calling.cancel()
            assert await asyncio.wait_for(told.get(), 20) is grpc.StatusCode.CANCELLED


class TestLeaving:
    async def test_a_caller_that_leaves_ends_the_stream_at_once(self, served: Served) -> None:
        reached = asyncio.Event()
        served.servicer.act = hanging(reached, asyncio.Event())
        call = served.stub.WatchQuantizationJob(pb.WatchQuantizationJobRequest())
        await asyncio.wait_for(reached.wait(), 20)
        call.cancel()
        await asyncio.wait_for(served.servicer.cleaned_up.wait(), 20)

    async def test_a_deadline_is_logged_as_one(self, served: Served, kind: str) -> None:
        finished = asyncio.Event()
        lines: list[Any] = []

        def note(_: Any, __: str, line: Any) -> Any:
            if line["event"] == "call_finished":
                lines.append(line)
                finished.set()
            raise structlog.DropEvent

        structlog.configure(processors=[note])
        try:
            error = await served.failure(kind, hanging(asyncio.Event(), asyncio.Event()), timeout=0.2)
            await asyncio.wait_for(finished.wait(), 20)
        finally:
            structlog.reset_defaults()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert lines[0]["code"] == "DEADLINE_EXCEEDED"


class TestServer:
    @pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "192.0.2.1:0", "example.org:0"])
    async def test_an_address_that_others_reach_is_refused(self, address: str) -> None:
        with pytest.raises(errors.FailedPreconditionError, match="--insecure"):
            await GrpcServer([]).start(address)

    async def test_said_aloud_it_is_served(self) -> None:
        server = GrpcServer([])
        assert await server.start("0.0.0.0:0", insecure=True) > 0
        await server.stop(timedelta(0))

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
    async def test_a_loopback_address_is_served(self, host: str) -> None:
        server = GrpcServer([])
        assert await server.start(f"{host}:0") > 0
        await server.stop(timedelta(0))

    async def test_an_address_that_is_taken_is_unavailable(self, served: Served) -> None:
        with pytest.raises(errors.UnavailableError, match="cannot bind"):
            await GrpcServer([]).start(f"127.0.0.1:{served.port}")

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    async def test_reflection_lists_every_service_and_describes_ours(self, served: Served, version: str) -> None:
        ask = served.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=DESCRIPTOR.full_name),
        ]
        listed, described = [response async for response in ask(iter(requests))]
        assert {service.name for service in listed.list_services_response.service} == {
            "bitmill.quantizer.v1.QuantizerService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert described.file_descriptor_response.file_descriptor_proto

    async def test_health_names_each_service(self, served: Served) -> None:
        stub = health_pb2_grpc.HealthStub(served.channel)
        for name in ("", DESCRIPTOR.full_name):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_a_health_watch_sees_a_name_come_and_change(self, served: Served) -> None:
        statuses = health_of(served, "a model")
        assert await anext(statuses) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING):
            await served.server.health.set("a model", status)
            assert await anext(statuses) == status


class TestDrain:
    @pytest.mark.parametrize("service", ["", DESCRIPTOR.full_name, "nobody"])
    async def test_a_health_watch_does_not_hold_the_stop(self, served: Served, service: str) -> None:
        """It is told NOT_SERVING and ends, also one of a name that nobody has set."""
        statuses = health_of(served, service)
        first = await anext(statuses)
        await asyncio.wait_for(served.server.stop(timedelta(minutes=5)), 20)
        rest = [status async for status in statuses]
        assert rest == (
            []
            if first == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            else [health_pb2.HealthCheckResponse.NOT_SERVING]
        )

    async def test_nothing_makes_a_draining_server_serve_again(self, served: Served) -> None:
        await served.server.health.drain()
        await served.server.health.set("", health_pb2.HealthCheckResponse.SERVING)
        assert await anext(health_of(served)) == health_pb2.HealthCheckResponse.NOT_SERVING

    async def test_running_calls_end_and_health_watchers_are_told(self, served: Served, kind: str) -> None:
        reached, release = asyncio.Event(), asyncio.Event()
        served.servicer.act = hanging(reached, release)
        running = asyncio.create_task(served.call(kind))
        statuses = health_of(served)
        assert await anext(statuses) == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(reached.wait(), 20)
        stopping = asyncio.create_task(served.server.stop(timedelta(minutes=5)))
        assert [status async for status in statuses] == [health_pb2.HealthCheckResponse.NOT_SERVING]
        assert not running.done()
        release.set()
        await asyncio.wait_for(running, 20)
        await asyncio.wait_for(stopping, 20)

    async def test_new_calls_are_refused(self, served: Served) -> None:
        reached, release = asyncio.Event(), asyncio.Event()
        served.servicer.act = hanging(reached, release)
        running = asyncio.create_task(served.call("unary"))
        statuses = health_of(served)
        assert await anext(statuses) == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(reached.wait(), 20)
        stopping = asyncio.create_task(served.server.stop(timedelta(minutes=5)))
        assert await anext(statuses) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as late:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.QuantizerServiceStub(late).GetQuantizationJob(pb.GetQuantizationJobRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        await running
        await asyncio.wait_for(stopping, 20)

    async def test_a_call_that_does_not_end_is_ended_after_the_grace(self, served: Served, kind: str) -> None:
        reached = asyncio.Event()
        served.servicer.act = hanging(reached, asyncio.Event())
        running = asyncio.create_task(served.call(kind))
        await asyncio.wait_for(reached.wait(), 20)
        await asyncio.wait_for(served.server.stop(timedelta(seconds=0.1)), 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
