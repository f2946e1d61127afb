"""A real gRPC server on a loopback socket whose answers are scripted by method name.

It implements the generated servicer classes of both services, so client and CLI are tested through real stubs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from bitmill.artifact.v1 import artifact_service_pb2, artifact_service_pb2_grpc
from bitmill.inference.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)
from bitmill.quantizer.v1 import quantizer_service_pb2, quantizer_service_pb2_grpc
from bitmill_common import errors, grpc_status

_SERVICES = [
    (quantizer_service_pb2, quantizer_service_pb2_grpc, "QuantizerService"),
    (artifact_service_pb2, artifact_service_pb2_grpc, "ArtifactService"),
    (inference_service_pb2, inference_service_pb2_grpc, "InferenceService"),
    (model_service_pb2, model_service_pb2_grpc, "ModelService"),
]


@dataclass(frozen=True)
class ReceivedCall:
    """One call that the server received."""

    request: Any
    metadata: dict[str, str | bytes]
    time_remaining: float | None
    """Seconds to the caller's deadline; None without one."""


@dataclass
class Hang:
    """Sends nothing more until the caller leaves or `release` is set; `reached` says that a call is here."""

    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


Step = Message | errors.BitmillError | Hang
"""A response, an error in bitmill's own form, or a wait."""
Script = Step | Sequence[Step]


class FakeServer:
    """The server. `on("GetArtifact", response)` scripts a method: each argument answers one call, the last repeats."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """Starts to serve on a free port, in plain text without `credentials`."""
        self._credentials = credentials
        self.received: dict[str, list[ReceivedCall]] = {}
        self._scripts: dict[str, list[Script]] = {}
        self._leaving: list[threading.Event] = []
        self._port = 0
        self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def on(self, method: str, *scripts: Script) -> None:
        self._scripts[method] = list(scripts)

    def only_call(self, method: str) -> ReceivedCall:
        (call,) = self.received[method]
        return call

    def stop(self) -> None:
        """Closes the socket and drops every running call, as a killed server does."""
        for event in self._leaving:
            event.set()
        self._server.stop(None).wait()

    def restart(self) -> None:
        """Drops every running call and serves on the same port again."""
        self.stop()
        self._start()

    def _start(self) -> None:
        self._server = self._new_server()
        if self._credentials is None:
            self._port = self._server.add_insecure_port(self.address)
        else:
            self._port = self._server.add_secure_port(self.address, self._credentials)
        self._server.start()

    def _new_server(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        for messages, stubs, name in _SERVICES:
            servicer = self._servicer(messages.DESCRIPTOR.services_by_name[name], getattr(stubs, f"{name}Servicer"))
            getattr(stubs, f"add_{name}Servicer_to_server")(servicer, server)
        return server

    def _servicer(self, descriptor: Any, base: type) -> Any:
        handlers = {
            method.name: self._stream_handler(method.name) if method.server_streaming else self._unary(method.name)
            for method in descriptor.methods
        }
        return type(f"Fake{descriptor.name}", (base,), handlers)()

    def _unary(self, method: str) -> Callable[..., Any]:
        def handle(_: Any, request: Any, context: grpc.ServicerContext) -> Any:
            return next(self._run(method, request, context))

        return handle

    def _stream_handler(self, method: str) -> Callable[..., Iterator[Any]]:
        def handle(_: Any, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            yield from self._run(method, request, context)

        return handle

    def _run(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        remaining = context.time_remaining()
        metadata = {key: value for key, value in context.invocation_metadata()}  # noqa: C416  # pairs, not a mapping
        call = ReceivedCall(request, metadata, remaining if remaining and remaining < 1e8 else None)
        calls = self.received.setdefault(method, [])
        calls.append(call)
        scripts = self._scripts.get(method)
        if scripts is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not scripted")
        script = scripts[min(len(calls), len(scripts)) - 1]
        for step in script if isinstance(script, Sequence) else [script]:
            match step:
                case errors.BitmillError():
                    _abort(context, step, str(metadata.get("x-request-id", "")))
                case Hang():
                    self._hang(step, context)
                case _:
                    yield step

    def _hang(self, hang: Hang, context: grpc.ServicerContext) -> None:
        self._leaving.append(hang.release)
        if not context.add_callback(hang.release.set):
            hang.release.set()  # The caller has left already.
        hang.reached.set()
        assert hang.release.wait(60), "nobody ended the call"


def _abort(context: grpc.ServicerContext, error: errors.BitmillError, request_id: str) -> NoReturn:
    trailers = grpc_status.trailers(error, grpc_status.to_status(error))
    context.set_trailing_metadata((("x-request-id", request_id), *trailers))
    context.abort(grpc_status.code_of(error), error.message)
