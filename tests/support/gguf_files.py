"""Small GGUF files, written by hand: a valid header over tensors of zeros."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

ALIGNMENT = 32
# ggml's number of a type, elements of a block, bytes of a block.
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "BF16": (30, 1, 2)}
LLAMA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.context_length": 256,
    "llama.embedding_length": 256,
    "llama.block_count": 2,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"token{index}" for index in range(2000)],
    "tokenizer.ggml.add_bos_token": True,
}


def llama_tensors(type_name: str = "Q4_K", *, tied: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of LLAMA by name: type, and shape in PyTorch's order."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": (type_name, (2000, 256))}
    for layer in range(2):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": ("F32", (256,)),
            f"{block}.attn_q.weight": (type_name, (256, 256)),
            f"{block}.attn_k.weight": (type_name, (128, 256)),
            f"{block}.attn_v.weight": (type_name, (128, 256)),
            f"{block}.attn_output.weight": (type_name, (256, 256)),
            f"{block}.ffn_norm.weight": ("F32", (256,)),
            f"{block}.ffn_gate.weight": (type_name, (512, 256)),
            f"{block}.ffn_up.weight": (type_name, (512, 256)),
            f"{block}.ffn_down.weight": (type_name, (256, 512)),
        }
    tensors["output_norm.weight"] = ("F32", (256,))
    if not tied:
        tensors["output.weight"] = (type_name, (2000, 256))
    return tensors


def write_gguf(
    path: Path,
    metadata: Mapping[str, object] = LLAMA,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    *,
    version: int = 3,
) -> Path:
    """Write a file and return `path`."""
    tensors = llama_tensors() if tensors is None else tensors
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, (type_name, shape) in tensors.items():
        number, elements, size = TYPES[type_name]
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset)
        offset += _aligned(math.prod(shape) // elements * size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.ljust(_aligned(len(head)), b"\0") + bytes(offset))
    return path


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: object) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _text(value)
        case Sequence():
            items = [_typed(item) for item in value]
            kind = items[0][0] if items else 4
            return 9, struct.pack("<IQ", kind, len(items)) + b"".join(data for _, data in items)
    raise TypeError(f"no GGUF value: {value!r}")
