"""Conversations: messages, tools, and the message that the chunks of a stream make together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bitmill.errors import RequestValueError
from bitmill.filling import filled
from bitmill.inference.v1.generation_pb2 import ChatMessage
from bitmill.inference.v1.inference_service_pb2 import ChatResponse
from bitmill.inference.v1.tool_pb2 import Tool, ToolCall, ToolChoice, ToolChoiceMode
from bitmill.structured import json_text

Conversational = str | Iterable[ChatMessage | Mapping[str, Any]]
"""One user message as text, or messages: protobuf ones, or mappings with their fields: {"role": …, "content": …}."""
Tools = Iterable[Tool | Mapping[str, Any]]
"""Functions that the model may call: protobuf ones, or mappings {"name": …, "description": …, "parameters": …} with a
JSON Schema as mapping or text, bare or inside {"type": "function", "function": …}."""

_MODES = {
    "auto": ToolChoiceMode.TOOL_CHOICE_MODE_AUTO,
    "none": ToolChoiceMode.TOOL_CHOICE_MODE_NONE,
    "required": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED,
}


def chat_messages(messages: Conversational) -> list[ChatMessage]:
    """Returns the messages of a conversation; text alone is one user message."""
    if isinstance(messages, str):
        return [_message({"role": "user", "content": messages})]
    return [message if isinstance(message, ChatMessage) else _message(message) for message in messages]


def tools(given: Tools) -> list[Tool]:
    """Returns tools as the contract has them; RequestValueError naming a key that a tool does not have."""
    return [tool if isinstance(tool, Tool) else _tool(tool) for tool in given]


def tool_choice(choice: str | ToolChoice) -> ToolChoice:
    """Returns the choice of a mode ("auto", "none", "required") or else of the tool of that name."""
    if isinstance(choice, ToolChoice):
        return choice
    if choice in _MODES:
        return ToolChoice(mode=_MODES[choice])
    return filled(ToolChoice, function_name=choice)


def joined(chunks: Iterable[ChatResponse], index: int = 0) -> ChatMessage:
    """Returns the message that the chunks of `chat` make together, ready to go back into the conversation."""
    message = ChatMessage(role="assistant")
    calls: dict[int, ToolCall] = {}
    for chunk in chunks:
        if chunk.index != index:
            continue
        message.content += chunk.content
        message.reasoning += chunk.reasoning
        for delta in chunk.tool_calls:
            call = calls.setdefault(delta.index, ToolCall())
            call.id += delta.id
            call.name += delta.name
            call.arguments_json += delta.arguments_json
    message.tool_calls.extend(call for _, call in sorted(calls.items()))
    return message


def _message(fields: Mapping[str, Any]) -> ChatMessage:
    try:
        return ChatMessage(**fields)
    except ValueError as error:
        raise RequestValueError(f"message: {error}") from error


def _tool(given: Mapping[str, Any]) -> Tool:
    fields = dict(given.get("function", given))
    fields.pop("type", None)
    parameters = fields.pop("parameters", None)
    try:
        tool = Tool(**fields)
    except ValueError as error:
        raise RequestValueError(f"tool: {error}") from error
    if parameters is not None:
        tool.MergeFrom(filled(Tool, parameters_json_schema=json_text("parameters", parameters)))
    return tool
