"""Calibration samples: documents are tokenized, packed end to end and cut into samples of exactly one length.

Nothing here imports torch; the tokenizer is handed in.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from bitmill_engine_kit.builtin_text import calibration_documents
from bitmill_engine_kit.protocol import Calibration, EngineError

_BLOCK_BYTES = 1 << 16


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that packing needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a document, with the special tokens that the model expects around one."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        """A conversation as the model's prompt text."""
        ...


@dataclass(frozen=True)
class Samples:
    """Token ids to calibrate with, samples of equal length."""

    token_ids: tuple[array[int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples together."""
        return sum(map(len, self.token_ids))

    @property
    def digest(self) -> str:
        """SHA-256 of the samples: every sample's length, then its ids, all as 32-bit little-endian integers."""
        digest = hashlib.sha256()
        for sample in self.token_ids:
            digest.update(struct.pack(f"<I{len(sample)}I", len(sample), *sample))
        return f"sha256:{digest.hexdigest()}"


def build_samples(calibration: Calibration, tokenizer: Tokenizer, seed: int) -> Samples:
    """Read, tokenize and pack no more data than the samples need; the seed decides their order.

    Raises EngineError CALIBRATION_INVALID for data that cannot be used and CALIBRATION_TOO_SMALL for too little of it.
    """
    length, wanted = calibration.max_sequence_length, calibration.num_samples
    samples = list(islice(pack(_tokenized_documents(calibration.path, tokenizer, seed), length), wanted))
    if len(samples) < wanted:
        name = calibration.path.name if calibration.path else "the built-in text"
        raise EngineError(
            "CALIBRATION_TOO_SMALL",
            f"{name} holds {len(samples)} samples of {length} tokens; {wanted} are asked for",
            available_samples=len(samples),
            num_samples=wanted,
            max_sequence_length=length,
        )
    random.Random(seed).shuffle(samples)  # noqa: S311 (an order, not a secret)
    return Samples(tuple(samples))


def pack(documents: Iterator[list[int]], length: int) -> Iterator[array[int]]:
    """Lay documents end to end and cut them into pieces of `length` tokens; what is left over is dropped."""
    pending: array[int] = array("I")
    for document in documents:
        pending.extend(document)
        whole = len(pending) // length * length
        for start in range(0, whole, length):
            yield pending[start : start + length]
        pending = pending[whole:]


def _tokenized_documents(path: Path | None, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    if path is None:
        return map(tokenizer.encode, calibration_documents(seed))
    if path.suffix == ".jsonl":
        return _tokenized_chats(path, tokenizer)
    return map(tokenizer.encode, _text_blocks(path))


def _text_blocks(path: Path) -> Iterator[str]:
    """A text file in blocks of bounded size, each taken as a document of its own."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                line += bytes(error.object[: error.start]).count(b"\n")
                raise _invalid(path, line, f"is not UTF-8: {error.reason}") from error
            line += text.count("\n")
            yield text
    if decoder.getstate()[0]:
        raise _invalid(path, line, "is not UTF-8: it ends within a character")


def _tokenized_chats(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """One conversation a line, as the chat template writes it."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            messages = _parse_messages(path, number, line)
            try:
                ids = tokenizer.apply_chat_template(messages, tokenize=True)
            # The template is the checkpoint's own program, so anything may come out of it.
            except Exception as error:
                raise _invalid(path, number, f"does not fit the chat template: {error}") from error
            yield ids["input_ids"] if isinstance(ids, Mapping) else ids


def _parse_messages(path: Path, number: int, line: bytes) -> list[dict[str, str]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise _invalid(path, number, f"is not JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise _invalid(path, number, 'has no non-empty list "messages"')
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            raise _invalid(path, number, f'has a message without "role" and "content" at position {index}')
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _invalid(path: Path, line: int, problem: str) -> EngineError:
    return EngineError("CALIBRATION_INVALID", f"{path.name}: line {line} {problem}", file=path.name, line=line)
