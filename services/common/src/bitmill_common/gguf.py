"""Headers of GGUF files, read without the tensors. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitmill_common.object_store import ObjectInfo, ObjectStore

MAX_HEADER_BYTES = 256 * 2**20
"""Several times the vocabulary and the merges of any model."""

_READ_BYTES = 4 * 2**20
_VERSIONS = (2, 3)
_MAX_COUNT = 1 << 20
_MAX_NAME_BYTES = 512
_MAX_DIMENSIONS = 4
_SIZE_LIMIT = 1 << 63
# Longer lists are a vocabulary; what a model's shape says is a number, or one for each layer.
_MAX_KEPT_LENGTH = 1024
_DEFAULT_ALIGNMENT = 32
_LENGTH_BYTES = 8
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# By the number of `enum ggml_type`: name, elements in a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: ggml's name of its type ("Q4_K"), and its shape in PyTorch's order, which is ggml's reversed."""

    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself: numbers, texts and short lists by key, lengths of all lists, tensors by name."""

    metadata: Mapping[str, object]
    lengths: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]


class GgufError(ValueError):
    """A file that is no whole GGUF file. `problem` is TRUNCATED or MALFORMED."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def read_gguf_header(store: ObjectStore, info: ObjectInfo) -> GgufHeader:
    """Returns the header of a file; `GgufError` when header and size cannot be right."""
    reader = _Reader(store, info)
    if reader.take(4) != b"GGUF":
        raise GgufError("MALFORMED", "it does not begin as a GGUF file does")
    if (version := reader.number("I")) not in _VERSIONS:
        raise GgufError(
            "MALFORMED", f"it has version {version} of the format; {' and '.join(map(str, _VERSIONS))} are read"
        )
    num_tensors, num_keys = reader.count("tensors"), reader.count("keys")
    metadata: dict[str, object] = {}
    lengths: dict[str, int] = {}
    for _ in range(num_keys):
        key = reader.name()
        value, length = _read_value(reader, key)
        if value is not None:
            metadata[key] = value
        if length is not None:
            lengths[key] = length
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for _ in range(num_tensors):
        name = reader.name()
        if name in tensors:
            raise GgufError("MALFORMED", f"it holds the tensor {name} twice")
        tensors[name], stop = _read_tensor(reader, name)
        end = max(end, stop)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_COUNT:
        raise GgufError("MALFORMED", f"its alignment is {alignment}")
    start = math.ceil(reader.offset / alignment) * alignment
    if tensors and start + end > info.size_bytes:
        raise GgufError("TRUNCATED", f"it has {info.size_bytes} bytes, its tensors end at {start + end}")
    return GgufHeader(metadata, lengths, tensors)


def _read_value(reader: _Reader, key: str) -> tuple[object, int | None]:
    """Returns a value and its length; None for the value of a long list, None for the length of what is no list."""
    kind = reader.number("I")
    if kind != _ARRAY:
        return _scalar(reader, kind, key)(), None
    item, length = reader.number("I"), reader.number("Q")
    if length > _MAX_COUNT * 16:
        raise GgufError("MALFORMED", f"{key} would have {length} entries")
    if length <= _MAX_KEPT_LENGTH:
        read = _scalar(reader, item, key)
        return [read() for _ in range(length)], length
    if item == _STRING:
        reader.skip_texts(length)
    else:
        reader.skip(length * struct.calcsize(_layout(item, key)))
    return None, length


def _scalar(reader: _Reader, kind: int, key: str) -> Callable[[], object]:
    if kind == _STRING:
        return reader.text
    layout = _layout(kind, key)
    return lambda: reader.number(layout)


def _layout(kind: int, key: str) -> str:
    if kind not in _SCALARS:
        raise GgufError("MALFORMED", f"{key} has the unknown type {kind}")
    return _SCALARS[kind]


def _read_tensor(reader: _Reader, name: str) -> tuple[GgufTensor, int]:
    """Returns a tensor and the end of its bytes, from the start of all tensors."""
    num_dimensions = reader.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise GgufError("MALFORMED", f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([reader.number("Q") for _ in range(num_dimensions)]))
    kind, offset = reader.number("I"), reader.number("Q")
    if kind not in _TYPES:
        raise GgufError("MALFORMED", f"tensor {name} has the unknown type {kind}")
    type_name, elements, block_bytes = _TYPES[kind]
    size = math.prod(shape)
    if size >= _SIZE_LIMIT or offset >= _SIZE_LIMIT or (shape and shape[-1] % elements):
        raise GgufError("MALFORMED", f"tensor {name} has a shape or an offset that is none: {shape}, {offset}")
    return GgufTensor(type_name, shape), offset + size // elements * block_bytes


class _Reader:
    """Reads a file from its start in pieces of a few MiB, as far as it is asked for."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self._store = store
        self._info = info
        self._buffer = b""
        self._start = 0
        self.offset = 0

    def take(self, size: int) -> bytes:
        begin = self.offset - self._start
        if begin + size > len(self._buffer):
            self._refill(size)
            begin = 0
        self.offset += size
        return self._buffer[begin : begin + size]

    def _refill(self, size: int) -> None:
        if self.offset + size > self._info.size_bytes:
            raise GgufError("TRUNCATED", f"it has {self._info.size_bytes} bytes, and its header goes on")
        if self.offset + size > MAX_HEADER_BYTES:
            raise GgufError("MALFORMED", f"its header would have more than {MAX_HEADER_BYTES} bytes")
        self._start = self.offset
        length = min(max(size, _READ_BYTES), self._info.size_bytes - self.offset)
        self._buffer = self._store.read(self._info.path, offset=self.offset, length=length)
        if len(self._buffer) < size:
            raise GgufError("TRUNCATED", "it became shorter while it was read")

    def skip(self, size: int) -> None:
        if self.offset + size > min(self._info.size_bytes, MAX_HEADER_BYTES):
            self._refill(size)
        self.offset += size
        if self.offset > self._start + len(self._buffer):
            self._buffer, self._start = b"", self.offset

    def skip_texts(self, count: int) -> None:
        """Passes over texts, as many as a vocabulary has: those that lie in what is read already in one loop."""
        while count:
            self.skip(self.number("Q"))
            count -= 1
            buffer, position = self._buffer, self.offset - self._start
            last = len(buffer) - _LENGTH_BYTES
            while count and position <= last:
                position += _LENGTH_BYTES + int.from_bytes(buffer[position : position + _LENGTH_BYTES], "little")
                count -= 1
            self.offset = self._start + position
            self.skip(0)

    def number(self, layout: str) -> int:
        """An integer, a float or a truth value; typed as the integer that most of them are."""
        value: int = struct.unpack(f"<{layout}", self.take(struct.calcsize(layout)))[0]
        return value

    def count(self, what: str) -> int:
        value = self.number("Q")
        if value > _MAX_COUNT:
            raise GgufError("MALFORMED", f"it would have {value} {what}")
        return value

    def text(self) -> str:
        size = self.number("Q")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise GgufError("MALFORMED", "it holds a text that is not UTF-8") from error

    def name(self) -> str:
        name = self.text()
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise GgufError("MALFORMED", f"it holds a name of {len(name)} characters")
        return name
