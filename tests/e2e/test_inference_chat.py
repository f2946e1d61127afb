"""Conversations on the real engine: the model's template, its parsers, and forms that force calls of tools.

Random weights call no tool and end no reasoning by themselves. Forms, a budget of reasoning and the template make them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from bitmill.inference.v1 import generation_pb2, tool_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import InferenceProcess
from support.inference_serving import error_info, violations

TIMEOUT_S = 120
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = tool_pb2.Tool(
    name="get_weather", description="Weather of a city", parameters_json_schema=json.dumps(SCHEMA), strict=True
)
TIME = tool_pb2.Tool(name="get_time")
REQUIRED = tool_pb2.ToolChoice(mode=tool_pb2.TOOL_CHOICE_MODE_REQUIRED)
USER = generation_pb2.ChatMessage(role="user", content="hi")
CALLS = (
    'Let me look.<tool_call>{"name": "get_weather", "arguments": {"city":"Rome","days":2}}</tool_call>'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)
NO_THINKING = {"enable_thinking": False}
THINKING = {"enable_thinking": True}


@pytest.fixture(scope="module")
def server(inference_server: InferenceProcess, tiny_checkpoints: Path) -> Iterator[InferenceProcess]:
    """The server with a further model "chat", which has parsers of calls and of reasoning."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    inference_server.load("chat", tiny_checkpoints / "chat", **parsers)
    yield inference_server
    inference_server.unload("chat")


@pytest.fixture(scope="module")
def no_blanks(tiny_checkpoints: Path) -> dict[int, float]:
    """A bias against white space, of which random weights would write JSON's without end."""
    vocabulary = json.loads((tiny_checkpoints / "chat/tokenizer.json").read_text())["model"]["vocab"]
    return {token_id: -100 for token, token_id in vocabulary.items() if token[0] in "ĠĊĉč"}


def fields(messages: Sequence[generation_pb2.ChatMessage] = (USER,), **more: Any) -> dict[str, Any]:
    values = struct_pb2.Struct()
    values.update(more.pop("kwargs", {}))
    sampling = generation_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 200} | more.pop("sampling", {}))
    fixed = {"messages": messages, "sampling_params": sampling, "chat_template_kwargs": values}
    return {"model": "chat"} | fixed | more


def chat(server: InferenceProcess, **more: Any) -> pb.ChatUnaryResponse:
    """The answer, which the stream makes as well: content, reasoning, each call, each sequence's end."""
    request = fields(**more)
    answer = server.inference.ChatUnary(pb.ChatUnaryRequest(**request), timeout=TIMEOUT_S)
    chunks = list(server.inference.Chat(pb.ChatRequest(**request), timeout=TIMEOUT_S))
    for choice in answer.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.content for chunk in own) == choice.message.content
        assert "".join(chunk.reasoning for chunk in own) == choice.message.reasoning
        assert [token_id for chunk in own for token_id in chunk.token_ids] == choice.token_ids
        assert streamed_calls(own) == [(call.name, call.arguments_json) for call in choice.message.tool_calls]
        assert [chunk.finish for chunk in own if chunk.HasField("finish")] == [choice.finish]
    usage = chunks[-1].usage
    usage.cached_tokens = answer.usage.cached_tokens
    assert usage == answer.usage
    return answer


def message_of(server: InferenceProcess, **more: Any) -> generation_pb2.ChatMessage:
    (choice,) = chat(server, **more).choices
    return choice.message


def streamed_calls(chunks: Sequence[pb.ChatResponse]) -> list[tuple[str, str]]:
    """Name and arguments of each call. Only its first delta has an id and a name."""
    calls: dict[int, list[tool_pb2.ToolCallDelta]] = {}
    for chunk in chunks:
        for delta in chunk.tool_calls:
            calls.setdefault(delta.index, []).append(delta)
    for first, *others in calls.values():
        assert first.id
        assert not any(delta.id or delta.name for delta in others)
    return [(deltas[0].name, "".join(delta.arguments_json for delta in deltas)) for _, deltas in sorted(calls.items())]


def refusal(server: InferenceProcess, **more: Any) -> grpc.RpcError:
    """The error, which both ways of asking give alike."""
    request = fields(**more)
    with pytest.raises(grpc.RpcError) as unary:
        server.inference.ChatUnary(pb.ChatUnaryRequest(**request), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as streamed:
        list(server.inference.Chat(pb.ChatRequest(**request), timeout=TIMEOUT_S))
    assert (unary.value.code(), unary.value.details()) == (streamed.value.code(), streamed.value.details())
    return unary.value


def prompt_of(server: InferenceProcess, **more: Any) -> str:
    """The prompt that the template makes, but for its first token."""
    answer = chat(server, sampling={"prompt_logprobs": 0, "max_tokens": 1}, **more)
    ids = [position.chosen.token_id for position in answer.prompt_logprobs]
    return str(server.inference.Detokenize(pb.DetokenizeRequest(model="chat", token_ids=ids)).text)


def test_the_template_shows_messages_tools_and_values(server: InferenceProcess) -> None:
    """Every field of a message; a value of the request as the number that it is."""
    messages = [
        generation_pb2.ChatMessage(role="user", content="q", name="bob"),
        generation_pb2.ChatMessage(
            role="assistant",
            content="a",
            reasoning="hm",
            tool_calls=[tool_pb2.ToolCall(id="1", name="get_time", arguments_json='{"x": 1}')],
        ),
        generation_pb2.ChatMessage(role="tool", content="noon", tool_call_id="1"),
    ]
    values = NO_THINKING | {"style": 3, "level": {"value": 4}}
    prompt = prompt_of(server, messages=messages, tools=[TIME], kwargs=values)
    assert prompt == (
        "system\nstyle 3 of 5<|im_end|>\n"
        "<|im_start|>system\n"
        '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}\n'
        "<|im_end|>\n"
        "<|im_start|>user bob\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        'a<tool_call>{"name": "get_time", "arguments": {"x": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon answers 1<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_last_message_may_go_on(server: InferenceProcess) -> None:
    """The prompt ends where it ends."""
    messages = [USER, generation_pb2.ChatMessage(role="assistant", content="So far")]
    prompt = prompt_of(server, messages=messages, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nSo far")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [generation_pb2.ChatMessage(role="assistant", content="first")]}, "an assistant cannot begin"),
        ({"kwargs": {"style": 3}}, "'level' is undefined"),
        ({"kwargs": {"style": 3, "level": {"value": "x"}}}, "str"),
    ],
)
def test_what_the_template_refuses_is_refused_in_its_words(
    more: dict[str, Any], words: str, server: InferenceProcess
) -> None:
    """What it raises, and what it stumbles over."""
    error = refusal(server, **more)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {"messages": "TEMPLATE_REFUSED"}
    assert words in error.details()


def test_required_calls_follow_their_schemas(server: InferenceProcess, no_blanks: dict[int, float]) -> None:
    """Random weights and a mask; several sequences, each with calls of its own."""
    sampling = {"temperature": 1, "seed": 3, "n": 3, "logit_bias": no_blanks}
    answer = chat(server, tools=[WEATHER], tool_choice=REQUIRED, kwargs=NO_THINKING, sampling=sampling)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_TOOL_CALLS)
        assert choice.message.content == choice.message.reasoning == ""
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.name == "get_weather"
            arguments = json.loads(call.arguments_json)
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["days"] in (1, 2, 3)
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == sum(
        len(choice.message.tool_calls) for choice in answer.choices
    )


def test_a_call_may_be_the_only_one(server: InferenceProcess, no_blanks: dict[int, float]) -> None:
    """parallel_tool_calls false ends the message after the first."""
    sampling = {"temperature": 1, "seed": 3, "n": 3, "logit_bias": no_blanks}
    answer = chat(
        server,
        tools=[WEATHER],
        tool_choice=REQUIRED,
        parallel_tool_calls=False,
        kwargs=NO_THINKING,
        sampling=sampling,
    )
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1, 1]


def test_a_tool_chosen_by_name_is_called(server: InferenceProcess, no_blanks: dict[int, float]) -> None:
    """Of two, and once; its log probabilities are those of all tokens."""
    sampling = {"temperature": 1, "seed": 5, "logit_bias": no_blanks, "logprobs": 1}
    choice = tool_pb2.ToolChoice(function_name="get_weather")
    (answer,) = chat(server, tools=[TIME, WEATHER], tool_choice=choice, kwargs=NO_THINKING, sampling=sampling).choices
    (call,) = answer.message.tool_calls
    assert call.name == "get_weather"
    assert sorted(json.loads(call.arguments_json)) == ["city", "days"]
    assert answer.finish.reason == generation_pb2.FINISH_REASON_TOOL_CALLS
    assert len(answer.logprobs) == len(answer.token_ids)


def test_a_call_cut_by_max_tokens_ends_with_length(server: InferenceProcess, no_blanks: dict[int, float]) -> None:
    """What there is of its arguments is given out."""
    sampling = {"temperature": 1, "seed": 5, "logit_bias": no_blanks, "max_tokens": 45}
    choice = tool_pb2.ToolChoice(function_name="get_weather")
    (answer,) = chat(server, tools=[WEATHER], tool_choice=choice, kwargs=NO_THINKING, sampling=sampling).choices
    assert answer.finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert answer.message.tool_calls[0].arguments_json.startswith("{")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_model_may_write_and_call(parallel: bool, server: InferenceProcess) -> None:
    """What it writes before the calls is content; without parallel calls, the first is all there is."""
    spelled = {"structured_outputs": {"choice": {"texts": [CALLS]}}}
    message = message_of(
        server,
        tools=[tool_pb2.Tool(name="get_weather"), TIME],
        parallel_tool_calls=parallel,
        kwargs=NO_THINKING,
        sampling=spelled,
    )
    assert message.content == "Let me look."
    calls = [(call.name, json.loads(call.arguments_json)) for call in message.tool_calls]
    assert calls == [("get_weather", {"city": "Rome", "days": 2}), ("get_time", {})][: 2 if parallel else 1]


def test_without_tools_a_call_is_text(server: InferenceProcess) -> None:
    """The model does not see tools that it may not call, and what looks like a call is content."""
    none = tool_pb2.ToolChoice(mode=tool_pb2.TOOL_CHOICE_MODE_NONE)
    spelled = {"structured_outputs": {"choice": {"texts": [CALLS]}}}
    message = message_of(server, tools=[TIME], tool_choice=none, kwargs=NO_THINKING, sampling=spelled)
    assert message == generation_pb2.ChatMessage(role="assistant", content=CALLS)
    assert "get_time" not in prompt_of(server, tools=[TIME], tool_choice=none)


def test_text_that_only_begins_like_a_call_is_whole(server: InferenceProcess) -> None:
    """A parser holds it back until it is clear what it is, which may be never."""
    texts = ["the end is <tool_"]
    spelled = {"structured_outputs": {"choice": {"texts": texts}}}
    assert message_of(server, tools=[TIME], kwargs=NO_THINKING, sampling=spelled).content == texts[0]


def test_reasoning_is_apart_from_content(server: InferenceProcess) -> None:
    """The form binds the answer alone; the budget ends the reasoning; its tokens are counted."""
    sampling = {"thinking_token_budget": 6, "structured_outputs": {"choice": {"texts": ["the answer is 42"]}}}
    answer = chat(server, kwargs=THINKING, sampling=sampling)
    (choice,) = answer.choices
    assert choice.message.content == "the answer is 42"
    assert choice.message.reasoning
    assert 0 < answer.usage.reasoning_tokens <= 6
    assert choice.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)


def test_reasoning_that_does_not_end_is_no_content(server: InferenceProcess) -> None:
    """Nor is an answer reasoning where the template has closed that."""
    endless = {"ignore_eos": True, "max_tokens": 12}
    answer = chat(server, kwargs=THINKING, sampling=endless)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning
    assert answer.usage.reasoning_tokens == answer.usage.completion_tokens == 12
    answer = chat(server, kwargs=NO_THINKING, sampling=endless)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.reasoning == ""
    assert answer.usage.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "object", "properties": 3}', {"tools[1].parameters_json_schema": "INVALID_JSON_SCHEMA"}),
        # Valid, but the engine's compiler does not know it.
        ('{"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}', None),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(
    schema: str, reason: dict[str, str] | None, server: InferenceProcess
) -> None:
    """By its place, or with the compiler's words."""
    tools = [WEATHER, tool_pb2.Tool(name="f", parameters_json_schema=schema, strict=True)]
    error = refusal(server, tools=tools, tool_choice=REQUIRED, sampling={"max_tokens": 20})
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    if reason:
        assert violations(error) == reason
    else:
        assert list(violations(error)) == ["tools"]
        assert "Lookbehind is not supported" in error.details()


def test_a_conversation_is_measured_as_the_template_writes_it(server: InferenceProcess) -> None:
    """Before it is tokenized, whichever part of it is long; one that is cut may be of any length."""
    long = "x" * 1_000_000
    call = tool_pb2.ToolCall(id="1", name="f", arguments_json=json.dumps({"a": long}))
    for messages in (
        [USER, generation_pb2.ChatMessage(role="assistant", reasoning=long)],
        [USER, generation_pb2.ChatMessage(role="assistant", tool_calls=[call])],
    ):
        error = refusal(server, messages=messages)
        assert violations(error) == {"messages": "PROMPT_TOO_LONG"}
        assert "characters" in error.details()
        answer = chat(server, messages=messages, sampling={"truncate_prompt_tokens": 5, "max_tokens": 1})
        assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 5000])
def test_arguments_that_python_does_not_read_are_refused(arguments: str, server: InferenceProcess) -> None:
    """Others that are no JSON are taken for none."""
    call = tool_pb2.ToolCall(id="1", name="f", arguments_json=arguments)
    error = refusal(server, messages=[USER, generation_pb2.ChatMessage(role="assistant", tool_calls=[call])])
    assert violations(error) == {"messages": "ARGUMENTS_UNREADABLE"}


def test_half_a_character_in_json_harms_nothing(server: InferenceProcess) -> None:
    """JSON can spell one where no text holds it: the template is given U+FFFD."""
    call = tool_pb2.ToolCall(id="1", name="f", arguments_json='{"a": "\\ud800"}')
    tool = tool_pb2.Tool(name="f", parameters_json_schema='{"type": "object", "title": "\\ud800"}')
    messages = [USER, generation_pb2.ChatMessage(role="assistant", tool_calls=[call])]
    assert chat(server, messages=messages, tools=[tool], sampling={"max_tokens": 1}).choices


def test_a_number_for_the_template_may_be_larger_than_any_integer(server: InferenceProcess) -> None:
    assert chat(server, kwargs={"level": {"value": 1e308}, "style": "a"}, sampling={"max_tokens": 1}).choices


def test_a_schema_that_is_nested_too_deeply_is_refused(server: InferenceProcess) -> None:
    schema = '{"properties": {"a": ' * 150 + "{}" + "}}" * 150
    error = refusal(server, tools=[tool_pb2.Tool(name="f", parameters_json_schema=schema)])
    assert violations(error) == {"tools[0].parameters_json_schema": "INVALID_JSON_SCHEMA"}


def test_a_model_without_a_parser_calls_no_tools(inference_server: InferenceProcess) -> None:
    """FAILED_PRECONDITION naming the option to load it with; tools that it may not call do no harm."""
    error = refusal(inference_server, model="tiny", tools=[TIME])
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).reason == "TOOL_PARSER_MISSING"
    assert error_info(error).metadata["option"] == "engine_options.tool_call_parser"
    none = tool_pb2.ToolChoice(mode=tool_pb2.TOOL_CHOICE_MODE_NONE)
    assert chat(inference_server, model="tiny", tools=[TIME], tool_choice=none, sampling={"max_tokens": 4}).choices


def test_an_unknown_parser_is_refused_with_the_known_ones(
    inference_server: InferenceProcess, tiny_checkpoints: Path
) -> None:
    """Before anything is loaded."""
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.load("other", tiny_checkpoints / "chat", tool_call_parser="smoke", reasoning_parser="fire")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(caught.value) == {
        "engine_options.tool_call_parser": "UNKNOWN_PARSER",
        "engine_options.reasoning_parser": "UNKNOWN_PARSER",
    }
    assert "hermes" in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.get("other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
