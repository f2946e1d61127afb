"""vLLM's own gRPC contract, `vllm.grpc.engine.VllmEngine`, on the engine of one of this server's models.

The SMG gateway, and whatever else speaks that contract, can so route to bitmill. The contract names no model; the
setting `vllm_service_model` does. A servicer of smg's does the work: it reads the messages and calls the `AsyncLLM`.
Needs the extra `smg`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2

from bitmill_common.errors import NotFoundError, UnavailableError
from bitmill_common.server import Binding
from bitmill_inference.models.models import Models
from bitmill_inference.ports import Engine

VLLM_ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]


class VllmEngineService:
    """`VllmEngine` on the model of that name or alias. Each call holds the model, so that unload and hot swap wait.

    While the model does not serve, calls fail with UNAVAILABLE and what it does instead. `new_servicer` makes the
    servicer of an engine, which gets the name too, once for each.
    """

    def __init__(self, models: Models, model: str, new_servicer: Callable[[Any, str], object]) -> None:
        self._models = models
        self._model = model
        self._new_servicer = new_servicer
        self._servicers: weakref.WeakKeyDictionary[Engine, object] = weakref.WeakKeyDictionary()

    @property
    def binding(self) -> Binding:
        """How a server mounts it."""
        handlers = {method.name: self._handler(method) for method in VLLM_ENGINE.methods}
        handler = grpc.method_handlers_generic_handler(VLLM_ENGINE.full_name, handlers)
        return Binding(VLLM_ENGINE, lambda server: server.add_generic_rpc_handlers((handler,)))

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        streaming = method.server_streaming
        make = grpc.unary_stream_rpc_method_handler if streaming else grpc.unary_unary_rpc_method_handler
        return make(
            cast(Any, self._stream(method.name) if streaming else self._unary(method.name)),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    def _unary(self, name: str) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            with self._leased_servicer() as servicer:
                return await getattr(servicer, name)(request, context)

        return call

    def _stream(self, name: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._leased_servicer() as servicer:
                async with contextlib.aclosing(getattr(servicer, name)(request, context)) as responses:
                    async for response in responses:
                        yield response

        return call

    @contextlib.contextmanager
    def _leased_servicer(self) -> Iterator[object]:
        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(self._models.lease(self._model)).engine
            except NotFoundError as error:
                # The caller named nothing that could be wrong, and a router tries another worker.
                raise UnavailableError("MODEL_NOT_LOADED", error.message, {"model": self._model}) from error
            servicer = self._servicers.get(engine)
            if servicer is None:
                servicer = self._servicers[engine] = self._new_servicer(engine, self._model)
            yield servicer
