"""`bitmill generate` and `bitmill chat`: text as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from bitmill.cli import output
from bitmill.cli.sampling import with_sampling_options
from bitmill.cli.session import INTERRUPTED, Session, session_of
from bitmill.client import InferenceClient, Stream
from bitmill.inference.v1.generation_pb2 import ChatMessage, FinishReason
from bitmill.inference.v1.inference_service_pb2 import ChatResponse, GenerateResponse

C = TypeVar("C", GenerateResponse, ChatResponse)
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
            _print(session, chunks, lambda chunk: chunk.text, [])


@with_sampling_options
def chat(
    context: typer.Context,
    sampling: dict[str, Any],
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="What to say. None: standard input, or a conversation.")
    ] = None,
    system: Annotated[str, typer.Option(help="What the system message says.")] = "",
    model: ModelName = "",
) -> None:
    """Answer a message, or hold a conversation when there is none and this is a terminal (Ctrl-D ends it)."""
    session = session_of(context)
    conversation = [ChatMessage(role="system", content=system)] if system else []
    with session.inference() as client:
        if message is None and sys.stdin.isatty():
            _converse(session, client, conversation, {"model": model, **sampling})
            return
        content = sys.stdin.read() if message is None else message
        conversation.append(ChatMessage(role="user", content=content))
        with client.chat(conversation, model=model, **sampling) as chunks:
            _print(session, chunks, lambda chunk: chunk.content, [])


def _converse(
    session: Session, client: InferenceClient, conversation: list[ChatMessage], options: dict[str, Any]
) -> None:
    """Takes turns until Ctrl-D. Ctrl-C while an answer comes ends that answer, and at the prompt the conversation."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        if not line.strip():
            continue
        conversation.append(ChatMessage(role="user", content=line))
        said: list[str] = []
        try:
            with client.chat(conversation, **options) as chunks:
                _print(session, chunks, lambda chunk: chunk.content, said)
        except KeyboardInterrupt:
            print()
        conversation.append(ChatMessage(role="assistant", content="".join(said)))


def _print(session: Session, chunks: Stream[C], text_of: Callable[[C], str], said: list[str]) -> None:
    """Prints the text of each chunk at once and adds it to `said`; on a terminal tells how it ended."""
    start = time.monotonic()
    last: C | None = None
    for chunk in chunks:
        last = chunk
        said.append(text_of(chunk))
        if session.json:
            output.emit(chunk)
        else:
            print(said[-1], end="", flush=True)
    if session.json:
        return
    print()
    if last is not None and sys.stderr.isatty():
        seconds = time.monotonic() - start
        tokens = last.usage.completion_tokens
        output.note(
            f"[{output.word(FinishReason, last.finish.reason)}: {last.usage.prompt_tokens} + {tokens} tokens, "
            f"{tokens / seconds:.1f} tokens/s]"
        )
