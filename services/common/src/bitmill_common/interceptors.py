"""The one interceptor of both servers: request id, call log, and domain errors to statuses.

Unary and streaming calls go through the same code, so an error has the same status on both.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog

from bitmill_common import errors, grpc_status

REQUEST_ID_KEY = "x-request-id"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
MAX_REQUEST_ID_CHARACTERS = 128

log = structlog.get_logger("bitmill.rpc")


def current_request_id() -> str:
    """Returns the id of the call being handled: the caller's x-request-id, or one of the server's own."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Binds the request id to the log context, logs each call once, and turns domain errors into statuses.

    An error that is not a `BitmillError` becomes INTERNAL with a fixed text and the request id; the log has the rest.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.request_streaming or _is_infrastructure(method):
            return handler
        serialization = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method), **serialization)
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method), **serialization)


def _is_infrastructure(method: str) -> bool:
    return method.startswith(("/grpc.health.", "/grpc.reflection."))


def _unary(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        record = _CallRecord(method, context)
        try:
            response = await behaviour(request, context)
        except BaseException as error:
            await record.fail(error)
        record.finish(grpc.StatusCode.OK)
        return response

    return call


def _stream(behaviour: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        record = _CallRecord(method, context)
        responses = behaviour(request, context)
        try:
            async for response in responses:
                yield response
        except BaseException as error:
            await record.fail(error)
        finally:
            # A caller that leaves closes this generator; the behaviour's own clean-up must run now, not at collection.
            await responses.aclose()  # type: ignore[attr-defined]
        record.finish(grpc.StatusCode.OK)

    return call


class _CallRecord:
    def __init__(self, method: str, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._start = time.monotonic()
        metadata = dict(context.invocation_metadata() or ())
        self._request_id = str(metadata.get(REQUEST_ID_KEY, ""))[:MAX_REQUEST_ID_CHARACTERS] or uuid.uuid4().hex
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=self._request_id, method=method)

    def finish(self, code: grpc.StatusCode, **fields: object) -> None:
        duration_ms = round((time.monotonic() - self._start) * 1000, 1)
        log.info("call_finished", code=code.name, duration_ms=duration_ms, **fields)

    async def fail(self, error: BaseException) -> NoReturn:
        match error:
            case asyncio.CancelledError() | GeneratorExit():
                self.finish(grpc.StatusCode.CANCELLED)
                raise error
            case grpc.aio.AbortError():
                raise error
            case errors.BitmillError():
                code = grpc_status.code_of(error)
                self.finish(code, reason=error.reason, message=error.message)
            case Exception():
                log.error("call_failed", exc_info=error)
                error = errors.InternalError(
                    "INTERNAL",
                    "internal error; the server's log has it by request id",
                    {"request_id": self._request_id},
                )
                code = grpc.StatusCode.INTERNAL
                self.finish(code)
            case _:
                raise error
        status = grpc_status.to_status(error)
        await self._context.abort(code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
        raise AssertionError("abort returned")
