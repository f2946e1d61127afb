"""Conversations and forms of output from Python values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bitmill import conversation, structured
from bitmill.errors import RequestValueError
from bitmill.inference.v1.generation_pb2 import ChatMessage
from bitmill.inference.v1.inference_service_pb2 import ChatResponse
from bitmill.inference.v1.structured_outputs_pb2 import Choices, StructuredOutputs
from bitmill.inference.v1.tool_pb2 import Tool, ToolCall, ToolCallDelta, ToolChoice, ToolChoiceMode

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_messages_are_text_mappings_or_protobuf() -> None:
    message = ChatMessage(role="user", content="hi")
    chat_messages = conversation.chat_messages
    assert chat_messages("hi") == chat_messages([{"role": "user", "content": "hi"}]) == [message]
    assert chat_messages([message]) == [message]


def test_a_message_with_calls_of_tools_is_a_mapping_too() -> None:
    call = {"id": "c1", "name": "f", "arguments_json": "{}"}
    (message,) = conversation.chat_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message == ChatMessage(role="assistant", tool_calls=[ToolCall(id="c1", name="f", arguments_json="{}")])


def test_an_unknown_field_of_a_message_is_named() -> None:
    with pytest.raises(RequestValueError, match="contents"):
        conversation.chat_messages([{"role": "user", "contents": "hi"}])


@pytest.mark.parametrize("parameters", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tool_is_a_mapping_bare_or_as_a_function(parameters: Any, wrapped: bool) -> None:
    bare = {"name": "weather", "description": "now", "parameters": parameters, "strict": True}
    (tool,) = conversation.tools([{"type": "function", "function": bare} if wrapped else bare])
    assert tool == Tool(name="weather", description="now", parameters_json_schema=json.dumps(SCHEMA), strict=True)
    assert conversation.tools([tool]) == [tool]


@pytest.mark.parametrize("wrong", [{"name": "f", "params": {}}, {"name": "f", "parameters": {"a": math.nan}}])
def test_a_tool_that_cannot_be_sent_says_why(wrong: Any) -> None:
    with pytest.raises(RequestValueError, match=r"params|parameters"):
        conversation.tools([wrong])


def test_a_choice_is_a_mode_or_a_tools_name() -> None:
    assert conversation.tool_choice("required") == ToolChoice(mode=ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED)
    assert conversation.tool_choice("weather") == ToolChoice(function_name="weather")
    named = ToolChoice(function_name="auto")
    assert conversation.tool_choice(named) == named


def test_chunks_make_one_message() -> None:
    deltas = [
        ToolCallDelta(index=0, id="c1", name="f", arguments_json='{"a"'),
        ToolCallDelta(index=1, id="c2", name="g"),
        ToolCallDelta(index=0, arguments_json=": 1}"),
        ToolCallDelta(index=1, arguments_json="{}"),
    ]
    chunks = [
        ChatResponse(reasoning="hm"),
        ChatResponse(index=1, content="another message"),
        ChatResponse(reasoning="m", content="Let me "),
        ChatResponse(content="see.", tool_calls=deltas[:2]),
        ChatResponse(tool_calls=deltas[2:]),
    ]
    assert conversation.joined(chunks) == ChatMessage(
        role="assistant",
        content="Let me see.",
        reasoning="hmm",
        tool_calls=[
            ToolCall(id="c1", name="f", arguments_json='{"a": 1}'),
            ToolCall(id="c2", name="g", arguments_json="{}"),
        ],
    )
    assert conversation.joined(chunks, 1).content == "another message"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (structured.json_schema({"type": "string"}), StructuredOutputs(json_schema='{"type": "string"}')),
        (structured.json_schema('{"type": "string"}'), StructuredOutputs(json_schema='{"type": "string"}')),
        (
            structured.json_object(disable_any_whitespace=True),
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
        (structured.regex("a+"), StructuredOutputs(regex="a+")),
        (structured.grammar("root ::= x"), StructuredOutputs(grammar="root ::= x")),
        (structured.choice("yes", "no"), StructuredOutputs(choice=Choices(texts=["yes", "no"]))),
        (structured.structural_tag({"a": 1}), StructuredOutputs(structural_tag='{"a": 1}')),
    ],
)
def test_forms(form: StructuredOutputs, expected: StructuredOutputs) -> None:
    assert form == expected


@pytest.mark.parametrize("schema", [{"a": object()}, {"a": math.inf}, {"a": {1, 2}}])
def test_a_schema_that_is_no_json_is_refused(schema: Any) -> None:
    with pytest.raises(RequestValueError, match="json_schema"):
        structured.json_schema(schema)
