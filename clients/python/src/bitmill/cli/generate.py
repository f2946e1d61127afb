"""`bitmill generate` and `bitmill chat`: text as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bitmill.cli import output
from bitmill.cli.answers import JsonView, MessageView, TextView, show
from bitmill.cli.sampling import file_option, json_of, text_of, with_sampling_options
from bitmill.cli.session import INTERRUPTED, Session, session_of
from bitmill.client import InferenceClient
from bitmill.conversation import joined
from bitmill.inference.v1.generation_pb2 import ChatMessage
from bitmill.inference.v1.inference_service_pb2 import ChatResponse

ModelName = Annotated[str, typer.Option(help="The model. May be left out when exactly one is loaded.")]


@with_sampling_options
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads standard input.")],
    sampling: dict[str, Any],
    model: ModelName = "",
) -> None:
    """Continue a text, printed as it comes."""
    session = session_of(context)
    with session.inference() as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        with client.generate(text, model=model, **sampling) as chunks:
            show(chunks, JsonView() if session.json else TextView(sampling.get("n", 1)), [])


@with_sampling_options
def chat(
    context: typer.Context,
    sampling: dict[str, Any],
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="What to say. None: standard input, or a conversation.")
    ] = None,
    system: Annotated[str, typer.Option(help="What the system message says.")] = "",
    model: ModelName = "",
    tools: Annotated[
        Path | None, file_option("Functions that the model may call: a JSON list, each with name and parameters.")
    ] = None,
    tool_choice: Annotated[
        str | None, typer.Option(metavar="CHOICE", help="auto, none, required, or the name of a tool.")
    ] = None,
    parallel_tool_calls: Annotated[bool | None, typer.Option(help="Allow more than one call in a message.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Values for the model's template, a JSON object.")
    ] = None,
) -> None:
    """Answer a message, or hold a conversation when there is none and this is a terminal (Ctrl-D ends it).

    Reasoning goes to standard error; a call of a tool is printed as name(arguments).
    """
    session = session_of(context)
    options: dict[str, Any] = {
        "model": model,
        "tools": json_of("--tools", text_of(tools), list) if tools else None,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "chat_template_kwargs": json_of("--chat-template-kwargs", chat_template_kwargs, dict)
        if chat_template_kwargs
        else None,
        **sampling,
    }
    given = {name: value for name, value in options.items() if value is not None}
    conversation = [ChatMessage(role="system", content=system)] if system else []
    with session.inference() as client:
        if message is None and sys.stdin.isatty():
            _converse(session, client, conversation, given)
            return
        conversation.append(ChatMessage(role="user", content=sys.stdin.read() if message is None else message))
        _answer(session, client, conversation, given, [])


def _converse(
    session: Session, client: InferenceClient, conversation: list[ChatMessage], options: dict[str, Any]
) -> None:
    """Takes turns until Ctrl-D. Ctrl-C while an answer comes ends that answer, and at the prompt the conversation."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            output.write("\n")
            return
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        if not line.strip():
            continue
        conversation.append(ChatMessage(role="user", content=line))
        said: list[ChatResponse] = []
        try:
            _answer(session, client, conversation, options, said)
        except KeyboardInterrupt:
            output.write("\n")
        conversation.append(joined(said))


def _answer(
    session: Session,
    client: InferenceClient,
    conversation: list[ChatMessage],
    options: dict[str, Any],
    said: list[ChatResponse],
) -> None:
    with client.chat(conversation, **options) as chunks:
        show(chunks, JsonView() if session.json else MessageView(options.get("n", 1)), said)
