"""How the answers of a model are printed: text as it comes, JSON lines when asked for."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol, TypeVar

from bitmill.cli import output
from bitmill.conversation import joined
from bitmill.inference.v1.generation_pb2 import FinishReason
from bitmill.inference.v1.inference_service_pb2 import ChatResponse, GenerateResponse

C = TypeVar("C", GenerateResponse, ChatResponse)
C_contra = TypeVar("C_contra", GenerateResponse, ChatResponse, contravariant=True)


class View(Protocol[C_contra]):
    """Shows the chunks of an answer as they come."""

    def show(self, chunk: C_contra) -> None:
        """Shows one chunk."""

    def end(self) -> None:
        """Ends what was shown."""


class JsonView:
    """One JSON object a line."""

    def show(self, chunk: GenerateResponse | ChatResponse) -> None:
        """Prints the chunk."""
        output.emit(chunk)

    def end(self) -> None:
        """Every line is ended already."""


class TextView:
    """One sequence as it comes; of several, each with its index in one piece when it has ended."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._texts: defaultdict[int, str] = defaultdict(str)

    def show(self, chunk: GenerateResponse) -> None:
        """Prints the chunk's text, or the text of its sequence."""
        if self._sequences == 1:
            output.write(chunk.text)
            return
        self._texts[chunk.index] += chunk.text
        if chunk.HasField("finish"):
            output.write(f"[{chunk.index}] {self._texts.pop(chunk.index)}\n")

    def end(self) -> None:
        """Ends the line of a single text."""
        if self._sequences == 1:
            output.write("\n")


class MessageView:
    """One message as it comes, its reasoning on standard error, then its calls of tools; several as `TextView`."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._chunks: defaultdict[int, list[ChatResponse]] = defaultdict(list)
        self._reasons = False
        self._open = False

    def show(self, chunk: ChatResponse) -> None:
        """Prints what is new."""
        self._chunks[chunk.index].append(chunk)
        if self._sequences == 1:
            self._show_delta(chunk)
        if chunk.HasField("finish"):
            message = joined(self._chunks.pop(chunk.index), chunk.index)
            calls = [f"{call.name}({call.arguments_json})" for call in message.tool_calls]
            if self._sequences > 1:
                output.write("\n".join([f"[{chunk.index}] {message.content}", *calls]) + "\n")
            elif calls:
                output.write("\n" * self._open + "\n".join(calls))

    def _show_delta(self, chunk: ChatResponse) -> None:
        if chunk.reasoning:
            self._reasons = True
            print(chunk.reasoning, end="", file=sys.stderr, flush=True)
        if chunk.content:
            if self._reasons:
                output.note("")
                self._reasons = False
            self._open = True
            output.write(chunk.content)

    def end(self) -> None:
        """Ends the line of a single message."""
        if self._sequences == 1:
            output.write("\n")


def show(chunks: Iterable[C], view: View[C], seen: list[C]) -> None:
    """Shows chunks and adds them to `seen`; on a terminal tells in the end how it went."""
    start = time.monotonic()
    for chunk in chunks:
        seen.append(chunk)
        view.show(chunk)
    view.end()
    if seen and sys.stderr.isatty() and not isinstance(view, JsonView):
        output.note(f"[{_summary(seen[-1], time.monotonic() - start)}]")


def _summary(last: GenerateResponse | ChatResponse, seconds: float) -> str:
    reason = output.word(FinishReason, last.finish.reason).replace("_", " ")
    tokens = last.usage.completion_tokens
    return f"{reason}: {last.usage.prompt_tokens} + {tokens} tokens, {tokens / seconds:.1f} tokens/s"
