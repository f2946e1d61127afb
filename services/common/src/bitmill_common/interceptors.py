"""The one interceptor of both servers: request id, call log, and domain errors to statuses.

Unary and streaming calls go through the same code, so an error has the same status on both.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import grpc
import structlog

from bitmill_common import errors, grpc_status

REQUEST_ID_KEY = "x-request-id"
MAX_REQUEST_ID_CHARACTERS = 128
# Of an error's text: a request may have thousands of wrong fields, and the text says what is wrong with each.
MAX_LOGGED_CHARACTERS = 4096

log = structlog.get_logger("bitmill.rpc")

CallObserver = Callable[[str, grpc.StatusCode, float], None]
"""Is told of each call that has ended: its method, its status code, and how many seconds it took."""

if TYPE_CHECKING:  # generic in the stubs alone
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


def current_request_id() -> str:
    """Returns the id of the call being handled: the caller's x-request-id, or one of the server's own."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


def request_id_of(metadata: Mapping[str, str | bytes]) -> str:
    """Returns the caller's id of a call, cut, or a new one when there is none that could go back in the trailers.

    gRPC sends printable ASCII alone, but receives other bytes from callers who speak HTTP/2 by themselves.
    """
    request_id = str(metadata.get(REQUEST_ID_KEY, ""))[:MAX_REQUEST_ID_CHARACTERS]
    return request_id if request_id.isascii() and request_id.isprintable() and request_id else uuid.uuid4().hex


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Binds the request id to the log context, logs each call once, and turns domain errors into statuses.

    An error that is not a `BitmillError` becomes INTERNAL with a fixed text and the request id; the log has the rest.
    The request id goes back in the trailers of every call.
    """

    def __init__(self, observer: CallObserver = lambda method, code, seconds: None) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of a call. Health and reflection stay as they are."""
        handler = cast("Handler | None", await continuation(handler_call_details))
        method = handler_call_details.method
        if handler is None or handler.request_streaming or method.startswith(("/grpc.health.", "/grpc.reflection.")):
            return cast("Handler", handler)
        observer = self._observer
        behaviour: Any
        if handler.response_streaming:
            behaviour = _stream(handler.unary_stream, method, observer)
            make_handler = grpc.unary_stream_rpc_method_handler
        else:
            behaviour = _unary(handler.unary_unary, method, observer)
            make_handler = grpc.unary_unary_rpc_method_handler
        return make_handler(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _unary(behaviour: Any, method: str, observer: CallObserver) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        async with _Call(method, context, observer):
            return await behaviour(request, context)

    return call


def _stream(behaviour: Any, method: str, observer: CallObserver) -> Callable[..., Awaitable[None]]:
    # A coroutine that writes, not a generator around a generator: one step less for every chunk.
    async def call(request: Any, context: Context) -> None:
        write = context.write
        # A caller that leaves cancels this task; the behaviour's own clean-up must run now, not at collection.
        async with _Call(method, context, observer), aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await write(response)

    return call


class _Call:
    """One call from its start to its status and its log line."""

    def __init__(self, method: str, context: Context, observer: CallObserver) -> None:
        self._method = method
        self._context = context
        self._observer = observer
        self._start = time.monotonic()
        metadata = dict(cast(Any, context.invocation_metadata()) or ())
        self._request_id = request_id_of(metadata)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=self._request_id, method=method)

    async def __aenter__(self) -> Self:
        # In the trailers: initial metadata would commit the call, and gRPC could not retry one that is refused.
        self._context.set_trailing_metadata(((REQUEST_ID_KEY, self._request_id),))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        match error:
            case None:
                self._log(grpc.StatusCode.OK)
            case asyncio.CancelledError() if _task_is_cancelled():
                late = self._context.time_remaining() == 0
                self._log(grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED)
            case grpc.aio.AbortError():
                # A servicer of someone else's has already ended the call with a status of its own.
                self._log(self._context.code(), message=self._context.details())
            case errors.BitmillError():
                message = error.message[:MAX_LOGGED_CHARACTERS]
                self._log(grpc_status.code_of(error), reason=error.reason, message=message)
                await self._abort(error)
            case Exception() | asyncio.CancelledError():
                log.error("call_failed", exc_info=error)
                self._log(grpc.StatusCode.INTERNAL)
                text = "internal error; the server's log has it by request id"
                await self._abort(errors.InternalError("INTERNAL", text, {"request_id": self._request_id}))

    def _log(self, code: grpc.StatusCode, **fields: object) -> None:
        seconds = time.monotonic() - self._start
        self._observer(self._method, code, seconds)
        log.info("call_finished", code=code.name, duration_ms=round(seconds * 1000, 1), **fields)

    async def _abort(self, error: errors.BitmillError) -> NoReturn:
        status = grpc_status.to_status(error)
        trailers = ((REQUEST_ID_KEY, self._request_id), *grpc_status.trailers(error, status))
        await self._context.abort(grpc_status.code_of(error), status.message, trailers)


def _task_is_cancelled() -> bool:
    """Whether gRPC cancelled this call, and not something inside it, which nobody would answer for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
