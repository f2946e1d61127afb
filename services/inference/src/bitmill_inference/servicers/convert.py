"""Between the messages of generation and the domain. Streaming and unary requests have the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

from bitmill.inference.v1 import generation_pb2, inference_service_pb2, structured_outputs_pb2
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_common.interceptors import MAX_REQUEST_ID_CHARACTERS
from bitmill_inference.inference import Generated
from bitmill_inference.requests.calls import MAX_ABORTED_IDS
from bitmill_inference.requests.generation import (
    Chunk,
    Finish,
    FinishReason,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from bitmill_inference.requests.prompts import Prompt, TextPrompt, TokensPrompt
from bitmill_inference.requests.sampling import (
    LIST_LIMITS,
    MAX_CHOICES,
    OutputForm,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)

T = TypeVar("T")

GenerateRequest = inference_service_pb2.GenerateRequest | inference_service_pb2.GenerateUnaryRequest

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
    FinishReason.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
    FinishReason.REPETITION: generation_pb2.FINISH_REASON_REPETITION,
}
_OUTPUT_FORMS = {
    "json_schema": OutputForm.JSON,
    "json_object": OutputForm.JSON_OBJECT,
    "choice": OutputForm.CHOICE,
    "regex": OutputForm.REGEX,
    "grammar": OutputForm.GRAMMAR,
    "structural_tag": OutputForm.STRUCTURAL_TAG,
}


def bounded(items: Sequence[T], limit: int) -> Sequence[T]:
    """Returns the items, of too many only one more than the limit: enough to be refused for.

    A message holds millions of small ones, and whatever is done for each of them holds every other call up.
    """
    return items if len(items) <= limit else items[: limit + 1]


def prompt(request: GenerateRequest) -> Prompt:
    """The prompt of Generate and GenerateUnary."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokensPrompt(tuple(request.token_ids.ids))
    raise prompt_missing("prompt", "set text or token_ids")


def sampling_params(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters; a field that is unset is None."""
    # Only what is set: a message has thirty fields, and most calls set three.
    return SamplingParams(**{field.name: _plain(field.name, value) for field, value in message.ListFields()})


def _plain(name: str, value: Any) -> Any:
    """The value of a field of SamplingParams as the domain has it."""
    match name:
        case "structured_outputs":
            return _structured_outputs(value)
        case "repetition_detection":
            return RepetitionDetection(value.max_pattern_size, value.min_pattern_size, value.min_count)
        case "logit_bias":
            return dict(islice(value.items(), LIST_LIMITS[name].limit + 1))
        case _ if name in LIST_LIMITS:
            return tuple(bounded(value, LIST_LIMITS[name].limit))
    return value


def aborted_ids(request: inference_service_pb2.AbortRequest) -> list[str]:
    """The ids that Abort names, as the server knows them."""
    request_ids = bounded(request.request_ids, MAX_ABORTED_IDS)
    return [request_id[:MAX_REQUEST_ID_CHARACTERS] for request_id in request_ids]


def generate_response(request_id: str, chunk: Chunk) -> inference_service_pb2.GenerateResponse:
    """One chunk of Generate."""
    response = inference_service_pb2.GenerateResponse(
        request_id=request_id, index=chunk.index, text=chunk.text, token_ids=chunk.token_ids
    )
    fill_chunk(response, chunk)
    return response


def generate_unary_response(request_id: str, generated: Generated) -> inference_service_pb2.GenerateUnaryResponse:
    """The response of GenerateUnary."""
    return inference_service_pb2.GenerateUnaryResponse(
        request_id=request_id,
        sequences=[
            inference_service_pb2.GeneratedSequence(
                index=chunk.index,
                text=chunk.text,
                token_ids=chunk.token_ids,
                logprobs=[logprobs_message(position) for position in chunk.logprobs],
                finish=finish_message(chunk.finish) if chunk.finish else None,
            )
            for chunk in generated.sequences
        ],
        usage=usage_message(generated.usage),
        prompt_logprobs=[logprobs_message(position) for position in generated.prompt_logprobs],
    )


def fill_chunk(
    response: inference_service_pb2.GenerateResponse | inference_service_pb2.ChatResponse, chunk: Chunk
) -> None:
    """Fills what chunks of Generate and Chat have in common, besides the text and the ids."""
    # Most chunks have none of these, and a stream has a chunk for each token.
    if chunk.logprobs:
        response.logprobs.extend(logprobs_message(position) for position in chunk.logprobs)
    if chunk.finish is not None:
        response.finish.CopyFrom(finish_message(chunk.finish))
    if chunk.usage is not None:
        response.usage.CopyFrom(usage_message(chunk.usage))
    if chunk.prompt_logprobs:
        response.prompt_logprobs.extend(logprobs_message(position) for position in chunk.prompt_logprobs)


def _structured_outputs(message: structured_outputs_pb2.StructuredOutputs) -> StructuredOutputs:
    name = message.WhichOneof("form")
    if name is None:
        return StructuredOutputs(None)
    value = tuple(bounded(message.choice.texts, MAX_CHOICES)) if name == "choice" else getattr(message, name)
    return StructuredOutputs(_OUTPUT_FORMS[name], value, message.disable_any_whitespace)


def finish_message(finish: Finish) -> generation_pb2.Finish:
    """How a sequence ended."""
    reason = _FINISH_REASONS[finish.reason]
    match finish.stop_match:
        case str() as text:
            return generation_pb2.Finish(reason=reason, stop_string=text)
        case int() as token_id:
            return generation_pb2.Finish(reason=reason, stop_token_id=token_id)
    return generation_pb2.Finish(reason=reason)


def usage_message(usage: Usage) -> generation_pb2.Usage:
    """Token counts."""
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def logprobs_message(position: PositionLogprobs) -> generation_pb2.PositionLogprobs:
    """Log probabilities of one position."""
    return generation_pb2.PositionLogprobs(
        chosen=_token_logprob(position.chosen), top=[_token_logprob(entry) for entry in position.top]
    )


def _token_logprob(entry: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=entry.token_id, token=entry.token, logprob=entry.logprob, rank=entry.rank
    )


def prompt_missing(field: str, description: str) -> InvalidArgumentError:
    """The error of a request without a prompt."""
    return InvalidArgumentError([FieldViolation(field, description, "PROMPT_EMPTY")])
