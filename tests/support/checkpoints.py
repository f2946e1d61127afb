"""Tiny Llama checkpoints, written by hand: a valid Hugging Face directory without torch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

BYTES_PER_ELEMENT = {"BF16": 2, "F16": 2, "F32": 4}
TORCH_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def write_checkpoint(
    directory: Path,
    *,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    vocab_size: int = 256,
    max_position_embeddings: int = 256,
    dtype: str = "BF16",
    num_shards: int = 1,
    tie_word_embeddings: bool = True,
    seed: int | None = 0,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Writes a checkpoint and returns `directory`.

    `dtype` is BF16, F16 or F32. With `num_shards` over 1 there is an index. Weights are small random values of `seed`;
    zeros with None, which take no room on the disk. `config` overrides fields of config.json; a value of None leaves
    the field out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shapes = llama_shapes(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        vocab_size=vocab_size,
        tie_word_embeddings=tie_word_embeddings,
    )
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie_word_embeddings,
        "torch_dtype": TORCH_DTYPE[dtype],
        "bos_token_id": 0,
        "eos_token_id": 0,
    } | dict(config or {})
    _write_json(directory / "config.json", {key: value for key, value in fields.items() if value is not None})
    _write_tokenizer(directory, vocab_size)
    _write_weights(directory, shapes, dtype, num_shards, seed)
    return directory


def llama_shapes(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_key_value_heads: int,
    vocab_size: int,
    tie_word_embeddings: bool,
) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a Llama, by name."""
    key_value_size = hidden_size // num_heads * num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden_size,),
            f"{prefix}.mlp.down_proj.weight": (hidden_size, intermediate_size),
            f"{prefix}.mlp.gate_proj.weight": (intermediate_size, hidden_size),
            f"{prefix}.mlp.up_proj.weight": (intermediate_size, hidden_size),
            f"{prefix}.post_attention_layernorm.weight": (hidden_size,),
            f"{prefix}.self_attn.k_proj.weight": (key_value_size, hidden_size),
            f"{prefix}.self_attn.o_proj.weight": (hidden_size, hidden_size),
            f"{prefix}.self_attn.q_proj.weight": (hidden_size, hidden_size),
            f"{prefix}.self_attn.v_proj.weight": (key_value_size, hidden_size),
        }
    shapes["model.norm.weight"] = (hidden_size,)
    if not tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return shapes


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16", seed: int | None = 0
) -> None:
    """Writes a safetensors file with tensors of these shapes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BYTES_PER_ELEMENT[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        if seed is None:
            writer.truncate(writer.tell() + offset)
            return
        generator = random.Random(seed)
        for shape in shapes.values():
            writer.write(_values(math.prod(shape), dtype, generator))


def _values(count: int, dtype: str, generator: random.Random) -> bytes:
    """Returns `count` elements, little-endian: values of either sign between 2**-7 and 2**-5.

    The low bytes are random, and the top byte is one of sign and exponent: 0x3C and 0xBC in the 8-bit exponent of
    BF16 and F32, 0x24 and 0xA4 in the 5-bit exponent of F16.
    """
    width = BYTES_PER_ELEMENT[dtype]
    values = bytearray(generator.randbytes(count * width))
    tops = (0x24, 0xA4) if dtype == "F16" else (0x3C, 0xBC)
    values[width - 1 :: width] = bytes(tops[byte & 1] for byte in values[width - 1 :: width])
    return bytes(values)


def _write_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, num_shards: int, seed: int | None
) -> None:
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", shapes, dtype, seed)
        return
    weight_map: dict[str, str] = {}
    names = list(shapes)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_safetensors(directory / file, {name: shapes[name] for name in held}, dtype, seed)
        weight_map |= dict.fromkeys(held, file)
    total = sum(math.prod(shape) for shape in shapes.values()) * BYTES_PER_ELEMENT[dtype]
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Writes a tokenizer of single bytes: token 0 ends a text, the others are the byte-level alphabet."""
    alphabet = _byte_level_alphabet()
    vocab = {"<|endoftext|>": 0} | {symbol: index for index, symbol in enumerate(alphabet[: vocab_size - 1], start=1)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    )


def _byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, the printable ASCII first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + index) for index in range(256 - len(printable))]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
