"""Which conversations, tools and choices of tools are valid, whatever the model is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitmill_common.errors import InvalidArgumentError
from bitmill_inference.requests import generation
from bitmill_inference.requests.prompts import (
    MAX_DETOKENIZE_IDS,
    MAX_MESSAGES,
    MAX_SCHEMA_CHARACTERS,
    MAX_TOKENIZE_CHARACTERS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    PROTECTED_TEMPLATE_KWARGS,
    ChatMessage,
    ChatPrompt,
    NamedTool,
    TextPrompt,
    Tool,
    ToolCall,
    ToolChoiceMode,
    check_detokenize,
    check_tokenize,
)
from bitmill_inference.requests.sampling import OutputForm, SamplingParams, StructuredOutputs

USER = ChatMessage("user", "hi")
WEATHER = Tool("get_weather", "Weather", '{"type": "object", "properties": {"city": {"type": "string"}}}')


def faults(prompt: ChatPrompt, params: SamplingParams | None = None) -> dict[str, str]:
    """The reasons by field; empty for a valid request."""
    try:
        generation.validate(prompt, params or SamplingParams())
    except InvalidArgumentError as error:
        return {violation.field: violation.reason for violation in error.violations}
    return {}


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt((USER,)),
        ChatPrompt((USER, ChatMessage("assistant", tool_calls=(ToolCall("1", "f", "not JSON"),)))),
        ChatPrompt((USER,), tools=(WEATHER, Tool("no-arguments"), Tool("A_" * 32))),
        ChatPrompt((USER,), tools=(WEATHER,), tool_choice=ToolChoiceMode.REQUIRED),
        ChatPrompt((USER,), tools=(WEATHER,), tool_choice=NamedTool("get_weather")),
        ChatPrompt((USER,), tool_choice=ToolChoiceMode.NONE),
        ChatPrompt((USER,), tools=tuple(Tool(f"f{index}") for index in range(MAX_TOOLS))),
        ChatPrompt((USER,), chat_template_kwargs={"enable_thinking": False, "documents": []}),
    ],
)
def test_valid_conversations(prompt: ChatPrompt) -> None:
    """Arguments that a model wrote need not be JSON: a conversation goes on after it got them wrong."""
    assert faults(prompt) == {}


def test_everything_wrong_is_named_at_once() -> None:
    """Messages, tools, the choice among them and values for the template, each by its path."""
    prompt = ChatPrompt(
        (ChatMessage("", "hi"), ChatMessage("assistant", tool_calls=(ToolCall("1", "", "{}"),))),
        tools=(
            Tool("two words"),
            Tool("same"),
            Tool("same"),
            Tool("broken", parameters_json_schema="{"),
            Tool("list", parameters_json_schema="[]"),
            Tool("text", parameters_json_schema='{"type": "string"}'),
            Tool("deep", parameters_json_schema="[" * 50_000),
        ),
        tool_choice=NamedTool("other"),
        chat_template_kwargs={"tools": [], "tokenize": True, "fine": 1},
    )
    assert faults(prompt) == {
        "messages[0].role": "INVALID_FIELD",
        "messages[1].tool_calls[0].name": "INVALID_FIELD",
        "tools[0].name": "INVALID_NAME",
        "tools[1].name": "DUPLICATE_TOOL",
        "tools[2].name": "DUPLICATE_TOOL",
        "tools[3].parameters_json_schema": "INVALID_JSON_SCHEMA",
        "tools[4].parameters_json_schema": "INVALID_JSON_SCHEMA",
        "tools[5].parameters_json_schema": "INVALID_JSON_SCHEMA",
        "tools[6].parameters_json_schema": "INVALID_JSON_SCHEMA",
        "tool_choice.function_name": "UNKNOWN_TOOL",
        "chat_template_kwargs.tokenize": "PROTECTED_KWARG",
        "chat_template_kwargs.tools": "PROTECTED_KWARG",
    }


@pytest.mark.parametrize(
    ("prompt", "field", "reason"),
    [
        (ChatPrompt(()), "messages", "PROMPT_EMPTY"),
        (ChatPrompt((), path="conversation.messages"), "conversation.messages", "PROMPT_EMPTY"),
        (ChatPrompt((USER,), tool_choice=ToolChoiceMode.REQUIRED), "tool_choice.mode", "TOOLS_MISSING"),
        (ChatPrompt((USER,), tool_choice=NamedTool("f")), "tool_choice.function_name", "UNKNOWN_TOOL"),
        (ChatPrompt((USER,), tool_choice=NamedTool("")), "tool_choice.function_name", "UNKNOWN_TOOL"),
        (ChatPrompt((USER,), tools=(Tool("a" * 65),)), "tools[0].name", "INVALID_NAME"),
        (ChatPrompt((USER,), tools=(Tool(""),)), "tools[0].name", "INVALID_NAME"),
        (ChatPrompt((USER,), tools=(Tool("ends\n"),)), "tools[0].name", "INVALID_NAME"),
        (
            ChatPrompt((USER,), tools=tuple(Tool(f"f{index}") for index in range(MAX_TOOLS + 1))),
            "tools",
            "TOO_MANY_TOOLS",
        ),
        (ChatPrompt((USER,) * (MAX_MESSAGES + 1)), "messages", "TOO_MANY_MESSAGES"),
        (
            ChatPrompt((ChatMessage("assistant", tool_calls=(ToolCall("1", "f", ""),) * (MAX_TOOL_CALLS + 1)),)),
            "messages[0].tool_calls",
            "TOO_MANY_TOOL_CALLS",
        ),
        (
            ChatPrompt((USER,), tools=(Tool("f", parameters_json_schema="{}" + " " * MAX_SCHEMA_CHARACTERS),)),
            "tools[0].parameters_json_schema",
            "TOO_LONG",
        ),
    ],
)
def test_one_fault(prompt: ChatPrompt, field: str, reason: str) -> None:
    """A field, and a stable word for what is wrong with it."""
    assert faults(prompt) == {field: reason}


@pytest.mark.parametrize("name", sorted(PROTECTED_TEMPLATE_KWARGS))
def test_values_that_the_server_sets_are_not_the_callers(name: str) -> None:
    """Silently replaced, they would leave the caller wondering."""
    prompt = ChatPrompt((USER,), chat_template_kwargs={name: None})
    assert faults(prompt) == {f"chat_template_kwargs.{name}": "PROTECTED_KWARG"}


@pytest.mark.parametrize("choice", [ToolChoiceMode.REQUIRED, NamedTool("get_weather")])
def test_a_forced_call_keeps_to_its_schema_unless_the_tool_says_otherwise(choice: ToolChoiceMode | NamedTool) -> None:
    """Unset means strict where the call is forced, and the parser's own default where the model decides."""
    loose = replace(WEATHER, name="loose", strict=False)
    forced = ChatPrompt((USER,), tools=(WEATHER, loose), tool_choice=choice)
    assert [tool.strict for tool in forced.offered_tools] == [True, False]
    assert [tool.strict for tool in replace(forced, tool_choice=ToolChoiceMode.AUTO).offered_tools] == [None, False]


def test_a_forced_call_excludes_a_form_of_the_output() -> None:
    """The output cannot be both; where the model decides, it may choose between a call and the form."""
    params = SamplingParams(structured_outputs=StructuredOutputs(OutputForm.CHOICE, ("yes",)))
    for choice in (ToolChoiceMode.REQUIRED, NamedTool("get_weather")):
        prompt = ChatPrompt((USER,), tools=(WEATHER,), tool_choice=choice)
        assert faults(prompt, params) == {"sampling_params.structured_outputs": "FORM_WITH_TOOL_CHOICE"}
    assert faults(ChatPrompt((USER,), tools=(WEATHER,)), params) == {}


def test_calls_of_tools_need_the_text() -> None:
    """Without it there is nothing to read them from; tools that the model does not see do not matter."""
    params = SamplingParams(detokenize=False)
    prompt = ChatPrompt((USER,), tools=(WEATHER,))
    assert faults(prompt, params) == {"sampling_params.detokenize": "TOOLS_NEED_TEXT"}
    assert faults(ChatPrompt((USER,), tools=(WEATHER,), tool_choice=ToolChoiceMode.NONE), params) == {}


def test_tokenizing_is_bounded() -> None:
    """Text counts wherever it is in a conversation. Empty text is allowed."""
    check_tokenize(TextPrompt(""))
    check_tokenize(TextPrompt("x" * MAX_TOKENIZE_CHARACTERS))
    with pytest.raises(InvalidArgumentError) as caught:
        check_tokenize(TextPrompt("x" * (MAX_TOKENIZE_CHARACTERS + 1)))
    assert [(v.field, v.reason) for v in caught.value.violations] == [("text", "TEXT_TOO_LONG")]
    half = "x" * (MAX_TOKENIZE_CHARACTERS // 2)
    message = ChatMessage("assistant", half, reasoning=half, tool_calls=(ToolCall("1", "f", "{}"),))
    with pytest.raises(InvalidArgumentError) as caught:
        check_tokenize(ChatPrompt((USER, message), path="conversation.messages"))
    assert [v.field for v in caught.value.violations] == ["conversation.messages"]


def test_detokenizing_is_bounded() -> None:
    """At most a million ids."""
    check_detokenize([0] * MAX_DETOKENIZE_IDS)
    with pytest.raises(InvalidArgumentError) as caught:
        check_detokenize([0] * (MAX_DETOKENIZE_IDS + 1))
    assert [(v.field, v.reason) for v in caught.value.violations] == [("token_ids", "TOO_MANY_TOKENS")]
