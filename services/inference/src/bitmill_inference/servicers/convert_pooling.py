"""Between the messages of embedding and scoring and the domain."""

from __future__ import annotations

from collections.abc import Sequence

from bitmill.inference.v1 import inference_service_pb2
from bitmill_inference.requests.pooling import MAX_INPUTS, Embedded, EmbedParams, Scored, ScoreParams
from bitmill_inference.requests.prompts import Prompt, TextPrompt, TokensPrompt
from bitmill_inference.servicers.convert import bounded, usage_message


def embed_inputs(request: inference_service_pb2.EmbedRequest) -> Sequence[Prompt | None]:
    """What Embed is to embed; None for an input that is neither text nor token ids."""
    return [_input(message) for message in bounded(request.inputs, MAX_INPUTS)]


def embed_params(request: inference_service_pb2.EmbedRequest) -> EmbedParams:
    """How to embed; a field that is unset is None."""
    return EmbedParams(
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
        truncate_prompt_tokens=_truncation(request),
    )


def documents(request: inference_service_pb2.ScoreRequest) -> Sequence[str]:
    """What Score compares with the query."""
    return bounded(request.documents, MAX_INPUTS)


def score_params(request: inference_service_pb2.ScoreRequest) -> ScoreParams:
    """How to score; a field that is unset is None."""
    return ScoreParams(truncate_prompt_tokens=_truncation(request))


def embed_response(request_id: str, embedded: Embedded) -> inference_service_pb2.EmbedResponse:
    """The response of Embed."""
    return inference_service_pb2.EmbedResponse(
        request_id=request_id,
        embeddings=[inference_service_pb2.Embedding(values=vector) for vector in embedded.vectors],
        usage=usage_message(embedded.usage),
    )


def score_response(request_id: str, scored: Scored) -> inference_service_pb2.ScoreResponse:
    """The response of Score."""
    return inference_service_pb2.ScoreResponse(
        request_id=request_id, scores=scored.scores, usage=usage_message(scored.usage)
    )


def _input(message: inference_service_pb2.PoolingInput) -> Prompt | None:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokensPrompt(tuple(message.token_ids.ids))
    return None


def _truncation(request: inference_service_pb2.EmbedRequest | inference_service_pb2.ScoreRequest) -> int | None:
    return request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
