"""Calibration samples: token ids of documents, packed into samples; counts and a digest of them.

Nothing here imports torch; the tokenizer is handed in, so wrong data is refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bitmill_engine_kit.documents import Piece, Tokenizer, read_documents
from bitmill_engine_kit.protocol import MIN_SEQUENCE_LENGTH, TRUNCATE, Calibration, EngineError


@dataclass(frozen=True)
class Samples:
    """Token ids to calibrate with, and how many documents they were made of."""

    token_ids: tuple[array[int], ...]
    num_documents: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples together."""
        return sum(map(len, self.token_ids))

    @property
    def max_length(self) -> int:
        """Tokens in the longest sample."""
        return max(map(len, self.token_ids))

    @property
    def digest(self) -> str:
        """SHA-256 of the samples: every sample's length, then its ids, all as 32-bit little-endian integers."""
        digest = hashlib.sha256()
        for sample in self.token_ids:
            digest.update(struct.pack(f"<I{len(sample)}I", len(sample), *sample))
        return f"sha256:{digest.hexdigest()}"

    def batches(self, size: int) -> Iterator[list[array[int]]]:
        """At most `size` samples together, all of one length, so that none is padded; in their order otherwise."""
        waiting: dict[int, list[array[int]]] = {}
        for sample in self.token_ids:
            batch = waiting.setdefault(len(sample), [])
            batch.append(sample)
            if len(batch) == size:
                yield waiting.pop(len(sample))
        yield from waiting.values()

    def result(self, uncalibrated_modules: Iterable[str] = ()) -> dict[str, Any]:
        """The field `calibration` of the result event; no token reached `uncalibrated_modules`."""
        return {
            "digest": self.digest,
            "num_samples": len(self.token_ids),
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "uncalibrated_modules": list(uncalibrated_modules),
        }


def build_samples(calibration: Calibration, tokenizer: Tokenizer, seed: int) -> Samples:
    """Read, tokenize and pack no more data than the samples need; the seed decides their order.

    Raises EngineError CALIBRATION_INVALID for data that cannot be used and CALIBRATION_TOO_SMALL for too little of it.
    """
    documents = _Documents(read_documents(calibration, tokenizer, seed))
    length, truncating = calibration.max_sequence_length, calibration.packing == TRUNCATE
    packed = truncate(documents, length) if truncating else pack(documents, length)
    samples = list(islice(packed, calibration.num_samples))
    if len(samples) < calibration.num_samples:
        raise _too_small(calibration, len(samples))
    random.Random(seed).shuffle(samples)  # noqa: S311 (an order, not a secret)
    return Samples(tuple(samples), len(samples) if truncating else documents.count)


def pack(documents: Iterable[Sequence[int]], length: int) -> Iterator[array[int]]:
    """Lay documents end to end and cut them into pieces of `length` tokens; what is left over is dropped."""
    pending: array[int] = array("I")
    for document in documents:
        pending.extend(document)
        whole = len(pending) // length * length
        for start in range(0, whole, length):
            yield pending[start : start + length]
        pending = pending[whole:]


def truncate(documents: Iterable[Sequence[int]], length: int) -> Iterator[array[int]]:
    """Cut each document off after `length` tokens; those of fewer than MIN_SEQUENCE_LENGTH are left out."""
    for document in documents:
        if len(document) >= MIN_SEQUENCE_LENGTH:
            yield array("I", document[:length])


class _Documents:
    """Token ids piece by piece, and how many documents with any have begun."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self.count = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        for piece in self._pieces:
            self.count += piece.begins_document and len(piece.token_ids) > 0
            yield piece.token_ids


def _too_small(calibration: Calibration, available: int) -> EngineError:
    name = calibration.path.name if calibration.path else "the built-in text"
    kind = (
        f"documents of at least {MIN_SEQUENCE_LENGTH} tokens"
        if calibration.packing == TRUNCATE
        else f"samples of {calibration.max_sequence_length} tokens"
    )
    return EngineError(
        "CALIBRATION_TOO_SMALL",
        f"{name} holds {available} {kind}; {calibration.num_samples} are asked for",
        available_samples=available,
        num_samples=calibration.num_samples,
        max_sequence_length=calibration.max_sequence_length,
    )
