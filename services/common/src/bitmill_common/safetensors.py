"""Headers of safetensors files, read without the tensors. Format: https://github.com/huggingface/safetensors#format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from bitmill_common.object_store import ObjectInfo, ObjectStore

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

_FIRST_READ_BYTES = 256 * 2**10
_LENGTH_BYTES = 8
_SIZE_LIMIT = 1 << 63
# Several times what models have; patterns are matched against names, in time that grows faster than their length.
_MAX_NAME_CHARACTERS = 512

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element, by dtype, as the safetensors library names them."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: dtype as safetensors names it ("BF16"), shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_elements(self) -> int:
        """The product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


class HeaderError(ValueError):
    """A file that is no whole safetensors file. `problem` is TRUNCATED or MALFORMED."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def read_header(store: ObjectStore, info: ObjectInfo) -> dict[str, TensorInfo]:
    """Returns the tensors of a file in the order of their bytes; `HeaderError` when header and size cannot be right."""
    head = store.read(info.path, length=min(info.size_bytes, _FIRST_READ_BYTES))
    if len(head) < _LENGTH_BYTES:
        raise HeaderError("TRUNCATED", f"it has {len(head)} bytes, a header's length alone has {_LENGTH_BYTES}")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError("MALFORMED", f"its header would have {length} bytes, more than {MAX_HEADER_BYTES}")
    end = _LENGTH_BYTES + length
    if end > info.size_bytes:
        raise HeaderError("TRUNCATED", f"it has {info.size_bytes} bytes, its header alone ends at {end}")
    if end > len(head):
        head += store.read(info.path, offset=len(head), length=end - len(head))
    return _parse_header(head[_LENGTH_BYTES:end], info.path, info.size_bytes - end)


def require_unicode(document: object) -> None:
    """Raises `ValueError` for parsed JSON with an escaped lone surrogate, which no message can carry."""
    json.dumps(document, ensure_ascii=False).encode()


def _parse_header(data: bytes, file: str, data_bytes: int) -> dict[str, TensorInfo]:
    try:
        header = json.loads(data)
        require_unicode(header)
    except (ValueError, RecursionError) as error:
        raise HeaderError("MALFORMED", "its header is not JSON") from error
    if not isinstance(header, dict):
        raise HeaderError("MALFORMED", "its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _parse_tensor(name, entry, file) for name, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: item[1][0])
    end = 0
    for name, ((start, stop), _) in ordered:
        if start != end:
            raise HeaderError("MALFORMED", f"tensor {name} starts at {start}, the one before it ends at {end}")
        end = stop
    if end > data_bytes:
        raise HeaderError("TRUNCATED", f"it has {data_bytes} bytes of tensors, its header names {end}")
    if end < data_bytes:
        raise HeaderError("MALFORMED", f"it has {data_bytes} bytes of tensors, its header names only {end}")
    return {name: tensor for name, (_, tensor) in ordered}


def _parse_tensor(name: str, entry: object, file: str) -> tuple[tuple[int, int], TensorInfo]:
    if len(name) > _MAX_NAME_CHARACTERS:
        raise HeaderError("MALFORMED", f"tensor {name[:40]}… has a name of {len(name)} characters")
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise HeaderError("MALFORMED", f"tensor {name} lacks a dtype, shape or data_offsets")
    if dtype not in DTYPE_BITS:
        raise HeaderError("MALFORMED", f"tensor {name} has the unknown dtype {dtype}")
    if not all(type(size) is int and 0 <= size < _SIZE_LIMIT for size in (*shape, start, stop)):
        raise HeaderError("MALFORMED", f"tensor {name} has sizes or offsets that are none")
    tensor = TensorInfo(dtype, tuple(shape), file)
    if (stop - start) * 8 != tensor.num_elements * DTYPE_BITS[dtype]:
        raise HeaderError("MALFORMED", f"tensor {name} has {stop - start} bytes, which {dtype} {shape} does not have")
    return (start, stop), tensor
