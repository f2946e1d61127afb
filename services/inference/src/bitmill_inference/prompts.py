"""What a model is asked: text, token ids, or a conversation with its tools. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitmill_inference.violations import Violations


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


Prompt = TextPrompt | TokensPrompt | ChatPrompt


def check_prompt(prompt: Prompt, violations: Violations) -> None:
    """Notes a prompt that is empty, or a message without a role."""
    match prompt:
        case TextPrompt(text=""):
            violations.add("text", "the prompt is empty", "PROMPT_EMPTY")
        case TokensPrompt(token_ids=()):
            violations.add("token_ids.ids", "the prompt is empty", "PROMPT_EMPTY")
        case ChatPrompt(messages=(), path=path):
            violations.add(path, "the conversation has no message", "PROMPT_EMPTY")
        case ChatPrompt(messages=messages, path=path):
            for index, message in enumerate(messages):
                if not message.role:
                    violations.add(f"{path}[{index}].role", "a message needs a role")


def prompt_field(prompt: Prompt) -> str:
    """Returns the path of the prompt in its request."""
    match prompt:
        case TextPrompt():
            return "text"
        case TokensPrompt():
            return "token_ids.ids"
        case ChatPrompt(path=path):
            return path
