"""Between the messages of generation and the domain. Streaming and unary requests have the same fields."""

from __future__ import annotations

from collections.abc import Iterable

from bitmill.inference.v1 import generation_pb2, inference_service_pb2
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.generation import Chunk, Finish, FinishReason, PositionLogprobs, TokenLogprob, Usage
from bitmill_inference.inference import Generated
from bitmill_inference.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokensPrompt
from bitmill_inference.sampling import SamplingParams

GenerateRequest = inference_service_pb2.GenerateRequest | inference_service_pb2.GenerateUnaryRequest
ChatRequest = inference_service_pb2.ChatRequest | inference_service_pb2.ChatUnaryRequest

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
_REPEATED_FIELDS = ("stop", "stop_token_ids")
_OPTIONAL_FIELDS = tuple(
    descriptor.name
    for descriptor in generation_pb2.SamplingParams.DESCRIPTOR.fields
    if descriptor.name not in _REPEATED_FIELDS
)


def prompt(request: GenerateRequest) -> Prompt:
    """The prompt of Generate and GenerateUnary."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokensPrompt(tuple(request.token_ids.ids))
    raise _missing("prompt", "set text or token_ids")


def conversation(request: ChatRequest) -> ChatPrompt:
    """The conversation of Chat and ChatUnary."""
    return ChatPrompt(_messages(request.messages))


def tokenize_input(request: inference_service_pb2.TokenizeRequest) -> Prompt:
    """What Tokenize is to tokenize."""
    match request.WhichOneof("input"):
        case "text":
            add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return TextPrompt(request.text, add_special_tokens)
        case "conversation":
            return ChatPrompt(_messages(request.conversation.messages), path="conversation.messages")
    raise _missing("input", "set text or conversation")


def sampling_params(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters; a field that is unset is None."""
    values = {name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)}
    return SamplingParams(**values, stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids))


def generate_response(request_id: str, chunk: Chunk) -> inference_service_pb2.GenerateResponse:
    """One chunk of Generate."""
    response = inference_service_pb2.GenerateResponse(
        request_id=request_id, index=chunk.index, text=chunk.text, token_ids=chunk.token_ids
    )
    _fill(response, chunk)
    return response


def chat_response(request_id: str, chunk: Chunk) -> inference_service_pb2.ChatResponse:
    """One chunk of Chat."""
    response = inference_service_pb2.ChatResponse(
        request_id=request_id, index=chunk.index, content=chunk.text, token_ids=chunk.token_ids
    )
    _fill(response, chunk)
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
                logprobs=[_logprobs(position) for position in chunk.logprobs],
                finish=_finish(chunk.finish) if chunk.finish else None,
            )
            for chunk in generated.sequences
        ],
        usage=_usage(generated.usage),
    )


def chat_unary_response(request_id: str, generated: Generated) -> inference_service_pb2.ChatUnaryResponse:
    """The response of ChatUnary."""
    return inference_service_pb2.ChatUnaryResponse(
        request_id=request_id,
        choices=[
            inference_service_pb2.ChatChoice(
                index=chunk.index,
                message=generation_pb2.ChatMessage(role="assistant", content=chunk.text),
                token_ids=chunk.token_ids,
                logprobs=[_logprobs(position) for position in chunk.logprobs],
                finish=_finish(chunk.finish) if chunk.finish else None,
            )
            for chunk in generated.sequences
        ],
        usage=_usage(generated.usage),
    )


def _fill(response: inference_service_pb2.GenerateResponse | inference_service_pb2.ChatResponse, chunk: Chunk) -> None:
    # Most chunks have none of these, and a stream has a chunk for each token.
    if chunk.logprobs:
        response.logprobs.extend(_logprobs(position) for position in chunk.logprobs)
    if chunk.finish is not None:
        response.finish.CopyFrom(_finish(chunk.finish))
    if chunk.usage is not None:
        response.usage.CopyFrom(_usage(chunk.usage))


def _messages(messages: Iterable[generation_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(message.role, message.content) for message in messages)


def _finish(finish: Finish) -> generation_pb2.Finish:
    reason = _FINISH_REASONS[finish.reason]
    match finish.stop_match:
        case str() as text:
            return generation_pb2.Finish(reason=reason, stop_string=text)
        case int() as token_id:
            return generation_pb2.Finish(reason=reason, stop_token_id=token_id)
    return generation_pb2.Finish(reason=reason)


def _usage(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _logprobs(position: PositionLogprobs) -> generation_pb2.PositionLogprobs:
    return generation_pb2.PositionLogprobs(
        chosen=_token_logprob(position.chosen), top=[_token_logprob(entry) for entry in position.top]
    )


def _token_logprob(entry: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=entry.token_id, token=entry.token, logprob=entry.logprob, rank=entry.rank
    )


def _missing(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError([FieldViolation(field, description, "PROMPT_EMPTY")])
