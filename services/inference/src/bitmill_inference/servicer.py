"""The gRPC edge of InferenceService: convert, call, convert."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill.inference.v1 import inference_service_pb2_grpc
from bitmill_common.interceptors import current_request_id
from bitmill_inference import convert
from bitmill_inference.inference import Inference


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """See `inference_service.proto`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def Generate(self, request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        chunks = self._inference.stream(request.model, convert.prompt(request), params)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield convert.generate_response(request_id, chunk)

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: object) -> pb.GenerateUnaryResponse:
        """See `inference_service.proto`."""
        params = convert.sampling_params(request.sampling_params)
        generated = await self._inference.generate(request.model, convert.prompt(request), params)
        return convert.generate_unary_response(current_request_id(), generated)

    async def Chat(self, request: pb.ChatRequest, context: object) -> AsyncIterator[pb.ChatResponse]:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        chunks = self._inference.stream(request.model, convert.conversation(request), params)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield convert.chat_response(request_id, chunk)

    async def ChatUnary(self, request: pb.ChatUnaryRequest, context: object) -> pb.ChatUnaryResponse:
        """See `inference_service.proto`."""
        params = convert.sampling_params(request.sampling_params)
        generated = await self._inference.generate(request.model, convert.conversation(request), params)
        return convert.chat_unary_response(current_request_id(), generated)

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeResponse:
        """See `inference_service.proto`."""
        token_ids, max_model_len = await self._inference.tokenize(request.model, convert.tokenize_input(request))
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: object) -> pb.DetokenizeResponse:
        """See `inference_service.proto`."""
        text = await self._inference.detokenize(
            request.model, request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)
