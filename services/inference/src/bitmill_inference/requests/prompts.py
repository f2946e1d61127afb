"""What a model is asked: text, token ids, or a conversation with its tools. Plain data."""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitmill_inference.requests.violations import Violations

MAX_MESSAGES = 4096
# In one message.
MAX_TOOL_CALLS = 128
MAX_TOOLS = 128
# As of a form: a call of the tool may have to follow it.
MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024
# Text that Tokenize takes: seconds of a tokenizer's work, and well above any model's context.
MAX_TOKENIZE_CHARACTERS = 4 * 1024 * 1024
# Token ids that Detokenize takes.
MAX_DETOKENIZE_IDS = 1024 * 1024
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What a chat template's renderer is given besides the caller's values: fields of the request, or matters of the server.
PROTECTED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True)
class TextPrompt:
    """Text; the model's special tokens are added unless `add_special_tokens` is false."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model; `arguments_json` as the model wrote it."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation: who speaks, and what. The other fields as in `generation.proto`."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask its caller to run. `strict` None: the parser's own default."""

    name: str
    description: str = ""
    parameters_json_schema: str = ""
    strict: bool | None = None


class ToolChoiceMode(enum.Enum):
    """Whether the model calls tools; `tool.proto` says what each means."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True)
class NamedTool:
    """The choice of one tool by its name."""

    name: str


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, turned into tokens by the model's own chat template. `path` is its place in the request."""

    messages: tuple[ChatMessage, ...]
    path: str = "messages"
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoiceMode | NamedTool = ToolChoiceMode.AUTO
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model sees. A forced call keeps to its schema unless the tool says otherwise."""
        if self.tool_choice is ToolChoiceMode.NONE:
            return ()
        if not self.forces_tool_call:
            return self.tools
        return tuple(replace(tool, strict=tool.strict is not False) for tool in self.tools)

    @property
    def forces_tool_call(self) -> bool:
        """Whether the message must call a tool."""
        return isinstance(self.tool_choice, NamedTool) or self.tool_choice is ToolChoiceMode.REQUIRED


Prompt = TextPrompt | TokensPrompt | ChatPrompt


def check_prompt(prompt: Prompt, violations: Violations) -> None:
    """Notes everything that is wrong with a prompt whatever the model is."""
    match prompt:
        case TextPrompt(text=""):
            violations.add("text", "the prompt is empty", "PROMPT_EMPTY")
        case TokensPrompt(token_ids=()):
            violations.add("token_ids.ids", "the prompt is empty", "PROMPT_EMPTY")
        case ChatPrompt():
            _check_messages(prompt, violations)
            _check_tools(prompt.tools, violations)
            _check_tool_choice(prompt, violations)
            for name in sorted(PROTECTED_TEMPLATE_KWARGS & prompt.chat_template_kwargs.keys()):
                violations.add(
                    f"chat_template_kwargs.{name}", f"{name!r} is not the caller's to set here", "PROTECTED_KWARG"
                )


def check_tokenize(prompt: Prompt) -> None:
    """Raises InvalidArgumentError for a conversation that is not valid, or text above MAX_TOKENIZE_CHARACTERS."""
    violations = Violations()
    if isinstance(prompt, ChatPrompt):
        check_prompt(prompt, violations)
    if (characters := prompt_characters(prompt)) > MAX_TOKENIZE_CHARACTERS:
        violations.add(
            prompt_field(prompt),
            f"at most {MAX_TOKENIZE_CHARACTERS} characters, got {characters}",
            "TEXT_TOO_LONG",
        )
    violations.raise_if_any()


def check_detokenize(token_ids: Sequence[int]) -> None:
    """Raises InvalidArgumentError for more than MAX_DETOKENIZE_IDS."""
    violations = Violations()
    if len(token_ids) > MAX_DETOKENIZE_IDS:
        violations.add("token_ids", f"at most {MAX_DETOKENIZE_IDS} ids, got {len(token_ids)}", "TOO_MANY_TOKENS")
    violations.raise_if_any()


def prompt_field(prompt: Prompt) -> str:
    """Returns the path of the prompt in its request."""
    match prompt:
        case TextPrompt():
            return "text"
        case TokensPrompt():
            return "token_ids.ids"
        case ChatPrompt(path=path):
            return path


def prompt_characters(prompt: Prompt) -> int:
    """Returns how many characters of the caller's the tokenizer will see, what a template adds not counted."""
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case TokensPrompt():
            return 0
        case ChatPrompt(messages=messages, tools=tools):
            said = sum(len(m.role) + len(m.content) + len(m.reasoning) + len(m.name) for m in messages)
            called = sum(len(call.name) + len(call.arguments_json) for m in messages for call in m.tool_calls)
            return said + called + sum(len(tool.description) + len(tool.parameters_json_schema) for tool in tools)


def _check_messages(prompt: ChatPrompt, violations: Violations) -> None:
    path = prompt.path
    if not prompt.messages:
        violations.add(path, "the conversation has no message", "PROMPT_EMPTY")
    if len(prompt.messages) > MAX_MESSAGES:
        violations.add(path, f"at most {MAX_MESSAGES} messages", "TOO_MANY_MESSAGES")
    for index, message in enumerate(prompt.messages):
        if not message.role:
            violations.add(f"{path}[{index}].role", "a message needs a role")
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            violations.add(f"{path}[{index}].tool_calls", f"at most {MAX_TOOL_CALLS} calls", "TOO_MANY_TOOL_CALLS")
        for place, call in enumerate(message.tool_calls):
            if not call.name:
                violations.add(f"{path}[{index}].tool_calls[{place}].name", "a tool call needs a name")


def _check_tools(tools: Sequence[Tool], violations: Violations) -> None:
    if len(tools) > MAX_TOOLS:
        violations.add("tools", f"at most {MAX_TOOLS} tools", "TOO_MANY_TOOLS")
    counts = Counter(tool.name for tool in tools)
    for index, tool in enumerate(tools):
        if not TOOL_NAME.fullmatch(tool.name):
            violations.add(f"tools[{index}].name", 'must be 1 to 64 letters, digits, "_" and "-"', "INVALID_NAME")
        elif counts[tool.name] > 1:
            violations.add(f"tools[{index}].name", f"{tool.name!r} is the name of several tools", "DUPLICATE_TOOL")
        if tool.parameters_json_schema:
            _check_schema(f"tools[{index}].parameters_json_schema", tool.parameters_json_schema, violations)


def _check_schema(path: str, text: str, violations: Violations) -> None:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        violations.add(path, f"at most {MAX_SCHEMA_CHARACTERS} characters, got {len(text)}", "TOO_LONG")
        return
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        violations.add(path, f"is not JSON: {error}", "INVALID_JSON_SCHEMA")
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        violations.add(path, "must be the JSON Schema of an object", "INVALID_JSON_SCHEMA")


def _check_tool_choice(prompt: ChatPrompt, violations: Violations) -> None:
    match prompt.tool_choice:
        case ToolChoiceMode.REQUIRED if not prompt.tools:
            violations.add("tool_choice.mode", "a required tool call needs tools", "TOOLS_MISSING")
        case NamedTool(name=name) if name not in {tool.name for tool in prompt.tools}:
            violations.add("tool_choice.function_name", f"no tool is named {name!r}", "UNKNOWN_TOOL")
