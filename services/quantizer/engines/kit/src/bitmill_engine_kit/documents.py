"""Documents to calibrate with, read from a file one at a time and tokenized.

A line of a .jsonl file is a document. A .txt file is one document when documents are laid end to end; where each
becomes a sample of its own, its paragraphs are, which blank lines separate.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bitmill_engine_kit.builtin_text import calibration_documents
from bitmill_engine_kit.protocol import TRUNCATE, Calibration, EngineError

MAX_DOCUMENT_BYTES = 1 << 26
"""Of a line of JSON and of a paragraph: what is in memory at once."""
_BLOCK_BYTES = 1 << 16


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that calibration needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a document, with the special tokens that the model expects around one."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        """A conversation as the model's prompt text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        ...


@dataclass(frozen=True)
class Piece:
    """Token ids of a document, or of the part of a long one that is read at once."""

    token_ids: Sequence[int]
    begins_document: bool = True


def read_documents(calibration: Calibration, tokenizer: Tokenizer, seed: int) -> Iterator[Piece]:
    """Documents in the order of the file; the seed decides that of the text that comes with Python.

    Raises EngineError CALIBRATION_INVALID, while it is read, for a line that cannot be used.
    """
    path = calibration.path
    if path is None:
        return (Piece(tokenizer.encode(document)) for document in calibration_documents(seed))
    if path.suffix == ".jsonl":
        return map(Piece, _JsonLines(path, tokenizer).read())
    if calibration.packing == TRUNCATE:
        return (Piece(tokenizer.encode(paragraph)) for paragraph in _paragraphs(path))
    return (
        Piece(tokenizer.encode(block, add_special_tokens=not index), begins_document=not index)
        for index, block in enumerate(_text_blocks(path))
    )


class _JsonLines:
    """A .jsonl file whose lines are all of the kind of the first."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._read = {"messages": self._chat, "text": self._text, "input_ids": self._token_ids}
        self._vocabulary_size = 0

    def read(self) -> Iterator[Sequence[int]]:
        """Token ids line by line."""
        first: tuple[str, int] | None = None
        for number, line in _lines(self._path):
            if not line.strip():
                continue
            kind, value = self._parse(number, line)
            first = first or (kind, number)
            if kind != first[0]:
                problem = f"has {kind} where line {first[1]} has {first[0]}; all lines must be of one kind"
                raise _invalid(self._path, number, problem)
            yield self._read[kind](number, value)

    def _parse(self, number: int, line: bytes) -> tuple[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
            raise _invalid(self._path, number, f"is not JSON: {error}") from error
        kinds = [kind for kind in self._read if kind in fields] if isinstance(fields, dict) else []
        if len(kinds) != 1:
            found = f"has {' and '.join(kinds)}" if kinds else "has none"
            problem = f"{found} of {', '.join(self._read)}; an object with one of them is needed"
            raise _invalid(self._path, number, problem)
        return kinds[0], fields[kinds[0]]

    def _text(self, number: int, text: Any) -> Sequence[int]:
        if not isinstance(text, str):
            raise _invalid(self._path, number, 'has a "text" that is not a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write half a surrogate pair
            raise _invalid(self._path, number, f'has a "text" that is not Unicode: {error.reason}') from error
        return self._tokenizer.encode(text)

    def _token_ids(self, number: int, ids: Any) -> Sequence[int]:
        if not isinstance(ids, list):
            raise _invalid(self._path, number, 'has "input_ids" that are not a list')
        self._vocabulary_size = self._vocabulary_size or max(self._tokenizer.get_vocab().values()) + 1
        for position, one in enumerate(ids):
            if type(one) is not int or not 0 <= one < self._vocabulary_size:
                shown = json.dumps(one)[:40]
                problem = f"has {shown} at position {position}, which is no token id below {self._vocabulary_size}"
                raise _invalid(self._path, number, problem)
        return ids

    def _chat(self, number: int, messages: Any) -> Sequence[int]:
        """A conversation as the chat template writes it."""
        if not isinstance(messages, list) or not messages:
            raise _invalid(self._path, number, 'has no non-empty list "messages"')
        for index, message in enumerate(messages):
            fields = message if isinstance(message, dict) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise _invalid(self._path, number, f'has a message without "role" and "content" at position {index}')
        chat = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(chat, tokenize=True)
        # The template is the checkpoint's own program, so anything may come out of it.
        except Exception as error:
            raise _invalid(self._path, number, f"does not fit the chat template: {error}") from error
        token_ids: Sequence[int] = ids["input_ids"] if isinstance(ids, Mapping) else ids
        return token_ids


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines and their numbers, counted from one as editors count."""
    with path.open("rb") as file:
        number = 1
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            if len(line) > MAX_DOCUMENT_BYTES:
                raise _too_long(path, number)
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            number += 1


def _paragraphs(path: Path) -> Iterator[str]:
    """What stands between blank lines."""
    paragraph, size = [], 0
    for number, line in _lines(path):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _invalid(path, number, f"is not UTF-8: {error.reason}") from error
        if text.strip():
            paragraph.append(text)
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise _too_long(path, number)
        elif paragraph:
            yield "".join(paragraph)
            paragraph, size = [], 0
    if paragraph:
        yield "".join(paragraph)


def _text_blocks(path: Path) -> Iterator[str]:
    """A text file in blocks of bounded size, cut behind a line or before a space where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, pending = 1, ""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                line += bytes(error.object[: error.start]).count(b"\n")
                raise _invalid(path, line, f"is not UTF-8: {error.reason}") from error
            line += text.count("\n")
            end = text.rfind("\n") + 1 or max(text.rfind(" "), 0)
            if whole := pending + text[:end] if end else pending:
                yield whole
            pending = text[end:]
    if decoder.getstate()[0]:
        raise _invalid(path, line, "is not UTF-8: it ends within a character")
    if pending:
        yield pending


def _too_long(path: Path, line: int) -> EngineError:
    return _invalid(path, line, f"makes a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB")


def _invalid(path: Path, line: int, problem: str) -> EngineError:
    return EngineError("CALIBRATION_INVALID", f"{path.name}: line {line} {problem}", file=path.name, line=line)
