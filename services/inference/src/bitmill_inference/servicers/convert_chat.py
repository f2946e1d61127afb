"""Between the messages of conversations and the domain. Streaming and unary requests have the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct

from bitmill.inference.v1 import generation_pb2, inference_service_pb2, tool_pb2
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_common.structs import struct_values
from bitmill_inference.inference import Generated
from bitmill_inference.requests.generation import Chunk, ToolCallDelta
from bitmill_inference.requests.prompts import (
    MAX_MESSAGES,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatMessage,
    ChatPrompt,
    NamedTool,
    Prompt,
    TextPrompt,
    Tool,
    ToolCall,
    ToolChoiceMode,
)
from bitmill_inference.servicers.convert import (
    bounded,
    fill_chunk,
    finish_message,
    logprobs_message,
    prompt_missing,
    usage_message,
)

ChatRequest = inference_service_pb2.ChatRequest | inference_service_pb2.ChatUnaryRequest

_TOOL_CHOICE_MODES = {
    tool_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode.AUTO,
    tool_pb2.TOOL_CHOICE_MODE_AUTO: ToolChoiceMode.AUTO,
    tool_pb2.TOOL_CHOICE_MODE_NONE: ToolChoiceMode.NONE,
    tool_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode.REQUIRED,
}


def conversation(request: ChatRequest) -> ChatPrompt:
    """The conversation of Chat and ChatUnary."""
    return ChatPrompt(
        _messages(request.messages),
        tools=tuple(_tool(tool) for tool in bounded(request.tools, MAX_TOOLS)),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
        chat_template_kwargs=_template_kwargs(request.chat_template_kwargs),
        continue_final_message=request.continue_final_message,
    )


def tokenize_input(request: inference_service_pb2.TokenizeRequest) -> Prompt:
    """What Tokenize is to tokenize."""
    match request.WhichOneof("input"):
        case "text":
            add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return TextPrompt(request.text, add_special_tokens)
        case "conversation":
            return ChatPrompt(_messages(request.conversation.messages), path="conversation.messages")
    raise prompt_missing("input", "set text or conversation")


def chat_response(request_id: str, chunk: Chunk) -> inference_service_pb2.ChatResponse:
    """One chunk of Chat."""
    response = inference_service_pb2.ChatResponse(
        request_id=request_id, index=chunk.index, content=chunk.text, token_ids=chunk.token_ids
    )
    fill_chunk(response, chunk)
    if chunk.reasoning:
        response.reasoning = chunk.reasoning
    if chunk.tool_calls:
        response.tool_calls.extend(_tool_call_delta(delta) for delta in chunk.tool_calls)
    return response


def chat_unary_response(request_id: str, generated: Generated) -> inference_service_pb2.ChatUnaryResponse:
    """The response of ChatUnary."""
    return inference_service_pb2.ChatUnaryResponse(
        request_id=request_id,
        choices=[
            inference_service_pb2.ChatChoice(
                index=chunk.index,
                message=generation_pb2.ChatMessage(
                    role="assistant",
                    content=chunk.text,
                    reasoning=chunk.reasoning,
                    tool_calls=_tool_calls(chunk.tool_calls),
                ),
                token_ids=chunk.token_ids,
                logprobs=[logprobs_message(position) for position in chunk.logprobs],
                finish=finish_message(chunk.finish) if chunk.finish else None,
            )
            for chunk in generated.sequences
        ],
        usage=usage_message(generated.usage),
        prompt_logprobs=[logprobs_message(position) for position in generated.prompt_logprobs],
    )


def _messages(messages: Sequence[generation_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            message.role,
            message.content,
            message.reasoning,
            tuple(
                ToolCall(call.id, call.name, call.arguments_json)
                for call in bounded(message.tool_calls, MAX_TOOL_CALLS)
            ),
            message.tool_call_id,
            message.name,
        )
        for message in bounded(messages, MAX_MESSAGES)
    )


def _template_kwargs(message: Struct) -> dict[str, Any]:
    size = message.ByteSize()
    if size > MAX_TEMPLATE_KWARGS_BYTES:
        description = f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes, got {size}"
        raise InvalidArgumentError([FieldViolation("chat_template_kwargs", description, "TOO_LONG")])
    return struct_values(message, "chat_template_kwargs")


def _tool(message: tool_pb2.Tool) -> Tool:
    strict = message.strict if message.HasField("strict") else None
    return Tool(message.name, message.description, message.parameters_json_schema, strict)


def _tool_choice(message: tool_pb2.ToolChoice) -> ToolChoiceMode | NamedTool:
    if message.WhichOneof("choice") == "function_name":
        return NamedTool(message.function_name)
    # A mode of a later contract is as good as none.
    return _TOOL_CHOICE_MODES.get(message.mode, ToolChoiceMode.AUTO)


def _tool_call_delta(delta: ToolCallDelta) -> tool_pb2.ToolCallDelta:
    return tool_pb2.ToolCallDelta(index=delta.index, id=delta.id, name=delta.name, arguments_json=delta.arguments_json)


def _tool_calls(deltas: Sequence[ToolCallDelta]) -> list[tool_pb2.ToolCall]:
    calls: dict[int, tool_pb2.ToolCall] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, tool_pb2.ToolCall())
        call.id += delta.id
        call.name += delta.name
        call.arguments_json += delta.arguments_json
    return [calls[index] for index in sorted(calls)]
