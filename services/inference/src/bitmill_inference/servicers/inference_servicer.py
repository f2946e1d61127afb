"""The gRPC edge of InferenceService: convert, call, convert."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill.inference.v1 import inference_service_pb2_grpc
from bitmill_common.interceptors import current_request_id
from bitmill_inference.inference import Inference
from bitmill_inference.servicers import convert, convert_chat, convert_pooling
from bitmill_inference.servicers.convert_options import CallContext, request_options


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """See `inference_service.proto`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def Generate(self, request: pb.GenerateRequest, context: CallContext) -> AsyncIterator[pb.GenerateResponse]:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        options = request_options(request.request_options, request_id, context)
        chunks = self._inference.stream(request.model, convert.prompt(request), params, options)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield convert.generate_response(request_id, chunk)

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: CallContext) -> pb.GenerateUnaryResponse:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        options = request_options(request.request_options, request_id, context)
        generated = await self._inference.generate(request.model, convert.prompt(request), params, options)
        return convert.generate_unary_response(request_id, generated)

    async def Chat(self, request: pb.ChatRequest, context: CallContext) -> AsyncIterator[pb.ChatResponse]:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        options = request_options(request.request_options, request_id, context)
        chunks = self._inference.stream(request.model, convert_chat.conversation(request), params, options)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield convert_chat.chat_response(request_id, chunk)

    async def ChatUnary(self, request: pb.ChatUnaryRequest, context: CallContext) -> pb.ChatUnaryResponse:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert.sampling_params(request.sampling_params)
        options = request_options(request.request_options, request_id, context)
        generated = await self._inference.generate(request.model, convert_chat.conversation(request), params, options)
        return convert_chat.chat_unary_response(request_id, generated)

    async def Embed(self, request: pb.EmbedRequest, context: CallContext) -> pb.EmbedResponse:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        inputs, params = convert_pooling.embed_inputs(request), convert_pooling.embed_params(request)
        options = request_options(request.request_options, request_id, context)
        embedded = await self._inference.embed(request.model, inputs, params, options)
        return convert_pooling.embed_response(request_id, embedded)

    async def Score(self, request: pb.ScoreRequest, context: CallContext) -> pb.ScoreResponse:
        """See `inference_service.proto`."""
        request_id = current_request_id()
        params = convert_pooling.score_params(request)
        options = request_options(request.request_options, request_id, context)
        documents = convert_pooling.documents(request)
        scored = await self._inference.score(request.model, request.query, documents, params, options)
        return convert_pooling.score_response(request_id, scored)

    async def Abort(self, request: pb.AbortRequest, context: CallContext) -> pb.AbortResponse:
        """See `inference_service.proto`."""
        return pb.AbortResponse(aborted_calls=await self._inference.abort(convert.aborted_ids(request)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: CallContext) -> pb.TokenizeResponse:
        """See `inference_service.proto`."""
        prompt = convert_chat.tokenize_input(request)
        token_ids, max_model_len = await self._inference.tokenize(
            request.model, prompt, request_id=current_request_id()
        )
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: CallContext) -> pb.DetokenizeResponse:
        """See `inference_service.proto`."""
        text = await self._inference.detokenize(
            request.model,
            request.token_ids,
            skip_special_tokens=request.skip_special_tokens,
            request_id=current_request_id(),
        )
        return pb.DetokenizeResponse(text=text)
