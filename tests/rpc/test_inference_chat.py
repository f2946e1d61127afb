"""Conversations over a socket, with a fake engine behind the port: what it is given, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import struct_pb2

from bitmill.inference.v1 import generation_pb2, tool_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.requests.generation import Chunk, Finish, FinishReason, ToolCallDelta, Usage
from bitmill_inference.requests.prompts import (
    MAX_DETOKENIZE_IDS,
    MAX_TOKENIZE_CHARACTERS,
    ChatMessage,
    ChatPrompt,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoiceMode,
)
from support.inference_serving import Serving, error_info, serving, violations

MESSAGES = [generation_pb2.ChatMessage(role="user", content="hi")]
SCHEMA = '{"type": "object"}'
TOOLS = [tool_pb2.Tool(name="get_weather", parameters_json_schema=SCHEMA), tool_pb2.Tool(name="get_time")]
# Reasoning, content, and two calls whose arguments come in pieces.
SCRIPT = [
    Chunk(0, "", [1], reasoning="Rome "),
    Chunk(0, "", [2], reasoning="or Paris?"),
    Chunk(0, "Let me ", [3]),
    Chunk(0, "look.", [4]),
    Chunk(0, "", [5], tool_calls=[ToolCallDelta(0, "call-a", "get_weather", "")]),
    Chunk(0, "", [6], tool_calls=[ToolCallDelta(0, "", "", '{"city": "Ro')]),
    Chunk(0, "", [7]),
    Chunk(0, "", [8], tool_calls=[ToolCallDelta(0, "", "", 'me"}'), ToolCallDelta(1, "call-b", "get_time", "{}")]),
    Chunk(0, "", [9], finish=Finish(FinishReason.TOOL_CALLS), usage=Usage(5, 9, 0, reasoning_tokens=2)),
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with one model, "tiny"."""
    async with serving(tmp_path) as running:
        await running.load()
        yield running


async def given(server: Serving, request: pb.ChatUnaryRequest) -> ChatPrompt:
    """What the engine is given for a request."""
    await server.inference.ChatUnary(request)
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def refusal(server: Serving, **fields: object) -> grpc.aio.AioRpcError:
    """The error of a conversation, which both ways of asking give alike."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await server.inference.ChatUnary(pb.ChatUnaryRequest(messages=MESSAGES, **fields))
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await server.inference.Chat(pb.ChatRequest(messages=MESSAGES, **fields)).read()
    assert (unary.value.code(), unary.value.details()) == (streamed.value.code(), streamed.value.details())
    return unary.value


async def test_the_deltas_make_the_unary_message(server: Serving) -> None:
    """Reasoning, content and each call's arguments; a chunk for each token, even where it shows nothing yet."""
    server.engine.script = SCRIPT
    chunks = [chunk async for chunk in server.inference.Chat(pb.ChatRequest(messages=MESSAGES))]
    unary = await server.inference.ChatUnary(pb.ChatUnaryRequest(messages=MESSAGES))
    (choice,) = unary.choices
    assert choice.message == generation_pb2.ChatMessage(
        role="assistant",
        content="Let me look.",
        reasoning="Rome or Paris?",
        tool_calls=[
            tool_pb2.ToolCall(id="call-a", name="get_weather", arguments_json='{"city": "Rome"}'),
            tool_pb2.ToolCall(id="call-b", name="get_time", arguments_json="{}"),
        ],
    )
    assert choice.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_TOOL_CALLS)
    assert unary.usage.reasoning_tokens == 2
    assert [chunk.token_ids for chunk in chunks] == [[token_id] for token_id in choice.token_ids]
    assert "".join(chunk.content for chunk in chunks) == choice.message.content
    assert "".join(chunk.reasoning for chunk in chunks) == choice.message.reasoning
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    for index, call in enumerate(choice.message.tool_calls):
        own = [delta for delta in deltas if delta.index == index]
        assert (own[0].id, own[0].name) == (call.id, call.name)
        assert not any(delta.id or delta.name for delta in own[1:])
        assert "".join(delta.arguments_json for delta in own) == call.arguments_json
    assert (chunks[-1].finish, chunks[-1].usage) == (choice.finish, unary.usage)


async def test_every_field_of_a_message_reaches_the_engine(server: Serving) -> None:
    """Reasoning, calls, the call that is answered, and the speaker's name."""
    messages = [
        generation_pb2.ChatMessage(role="user", content="hi", name="bob"),
        generation_pb2.ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=[tool_pb2.ToolCall(id="1", name="get_time", arguments_json="{}")],
        ),
        generation_pb2.ChatMessage(role="tool", content="12:00", tool_call_id="1"),
    ]
    prompt = await given(server, pb.ChatUnaryRequest(messages=messages))
    assert prompt.messages == (
        ChatMessage("user", "hi", name="bob"),
        ChatMessage("assistant", reasoning="hm", tool_calls=(ToolCall("1", "get_time", "{}"),)),
        ChatMessage("tool", "12:00", tool_call_id="1"),
    )


async def test_tools_reach_the_engine(server: Serving) -> None:
    """An unset `strict` stays unset; unset, calls may be parallel and the model decides."""
    prompt = await given(server, pb.ChatUnaryRequest(messages=MESSAGES, tools=TOOLS))
    assert prompt.tools == (Tool("get_weather", parameters_json_schema=SCHEMA), Tool("get_time"))
    assert prompt.tool_choice is ToolChoiceMode.AUTO
    assert prompt.parallel_tool_calls
    assert not prompt.continue_final_message
    strict = tool_pb2.Tool(name="f", description="does", strict=False)
    request = pb.ChatUnaryRequest(
        messages=MESSAGES, tools=[strict], parallel_tool_calls=False, continue_final_message=True
    )
    prompt = await given(server, request)
    assert prompt.tools == (Tool("f", "does", "", strict=False),)
    assert not prompt.parallel_tool_calls
    assert prompt.continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, ToolChoiceMode.AUTO),
        ({"mode": tool_pb2.TOOL_CHOICE_MODE_UNSPECIFIED}, ToolChoiceMode.AUTO),
        ({"mode": tool_pb2.TOOL_CHOICE_MODE_AUTO}, ToolChoiceMode.AUTO),
        ({"mode": tool_pb2.TOOL_CHOICE_MODE_NONE}, ToolChoiceMode.NONE),
        ({"mode": tool_pb2.TOOL_CHOICE_MODE_REQUIRED}, ToolChoiceMode.REQUIRED),
        ({"function_name": "get_time"}, NamedTool("get_time")),
    ],
)
async def test_the_choice_among_tools(
    choice: dict[str, object], expected: ToolChoiceMode | NamedTool, server: Serving
) -> None:
    """A mode, or one tool by its name."""
    request = pb.ChatUnaryRequest(messages=MESSAGES, tools=TOOLS, tool_choice=tool_pb2.ToolChoice(**choice))
    assert (await given(server, request)).tool_choice == expected


async def test_values_for_the_template_are_plain(server: Serving) -> None:
    """Whole numbers are int, as a template would print and index with them."""
    values = struct_pb2.Struct()
    values.update({"level": 3, "share": 0.5, "deep": {"list": [1, True, None, "text"]}})
    prompt = await given(server, pb.ChatUnaryRequest(messages=MESSAGES, chat_template_kwargs=values))
    assert prompt.chat_template_kwargs == {"level": 3, "share": 0.5, "deep": {"list": [1, True, None, "text"]}}
    assert isinstance(prompt.chat_template_kwargs["level"], int)
    assert isinstance(prompt.chat_template_kwargs["deep"]["list"][0], int)


async def test_everything_wrong_is_named_at_once(server: Serving) -> None:
    """Tools, the choice, the template's values and sampling, on both ways of asking; nothing reaches the engine."""
    values = struct_pb2.Struct()
    values.update({"tokenize": True})
    seen = len(server.engine.requests)
    error = await refusal(
        server,
        tools=[tool_pb2.Tool(name="two words"), tool_pb2.Tool(name="f", parameters_json_schema="{")],
        tool_choice=tool_pb2.ToolChoice(function_name="g"),
        chat_template_kwargs=values,
        sampling_params=generation_pb2.SamplingParams(temperature=9),
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {
        "tools[0].name": "INVALID_NAME",
        "tools[1].parameters_json_schema": "INVALID_JSON_SCHEMA",
        "tool_choice.function_name": "UNKNOWN_TOOL",
        "chat_template_kwargs.tokenize": "PROTECTED_KWARG",
        "sampling_params.temperature": "OUT_OF_RANGE",
    }
    assert len(server.engine.requests) == seen


async def test_tools_need_a_parser_of_calls(server: Serving) -> None:
    """FAILED_PRECONDITION naming the option that the model was loaded without."""
    server.engine.failure = FailedPreconditionError(
        "TOOL_PARSER_MISSING", "no parser", {"option": "engine_options.tool_call_parser"}
    )
    error = await refusal(server, tools=TOOLS)
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).metadata["option"] == "engine_options.tool_call_parser"


async def test_a_conversation_on_a_model_that_does_not_generate(tmp_path: Path) -> None:
    """FAILED_PRECONDITION naming what it does instead; its tokenizer works."""
    async with serving(tmp_path) as server:
        server.engines.supported_tasks = ("embed", "score")
        await server.load()
        error = await refusal(server)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert error_info(error).reason == "TASK_UNSUPPORTED"
        assert error_info(error).metadata["supported_tasks"] == "embed, score"
        assert (await server.inference.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids


async def test_what_is_tokenized_is_bounded(server: Serving) -> None:
    """Neither text nor ids may hold a server for minutes."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.Tokenize(pb.TokenizeRequest(text="x" * (MAX_TOKENIZE_CHARACTERS + 1)))
    assert violations(caught.value) == {"text": "TEXT_TOO_LONG"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=[65] * (MAX_DETOKENIZE_IDS + 1)))
    assert violations(caught.value) == {"token_ids": "TOO_MANY_TOKENS"}
