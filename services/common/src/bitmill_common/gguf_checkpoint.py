"""A GGUF file as the Hugging Face checkpoint that transformers makes of it: config, and tensors by transformers' names.

Follows transformers 5.17: `GGUF_CONFIG_MAPPING` in integrations/ggml.py, `load_gguf_checkpoint` in
modeling_gguf_pytorch_utils.py, and gguf's tensor names. What transformers would load wrongly is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from bitmill_common.gguf import GgufHeader
from bitmill_common.safetensors import TensorInfo

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""The classes that files of these `general.architecture` become."""

MAX_EXPERTS = 4096
"""More than any model has; a tensor without elements may have any number."""
MAX_EXPERT_MATRICES = 1 << 18
"""Of all layers together: ten times those of the largest models. A header of a few bytes each can claim any number."""

_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_LEAVES_OF = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<leaf>\w+)\.(?P<suffix>weight|bias)")
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# How the tokenizers that transformers makes split a text before byte-pair encoding, as `tokenizer.ggml.pre` names
# it; files that do not say are of a time when there was one way for each.
_SPLITS = {"llama": ("default", "gpt-2")}
_QWEN_SPLITS = ("default", "qwen2")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def unsupported(header: GgufHeader) -> str | None:
    """Returns why transformers does not load a file rightly, as the end of a sentence about it; None when it does."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        return f"has the architecture {architecture}; of GGUF files {', '.join(sorted(ARCHITECTURES))} are read"
    if header.metadata.get("split.count", 1) not in (0, 1):
        return "is one part of several; join them with llama.cpp's gguf-split --merge"
    if architecture == "llama" and header.metadata.get("llama.expert_count", 0):
        return "is a mixture of experts in the llama architecture, which transformers does not read from GGUF"
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(name in header.tensors for name in _ROPE_TENSORS):
        return "scales its rotary positions, which transformers does not read from GGUF; take the original checkpoint"
    for name, tensor in header.tensors.items():
        if not any(_names(name, architecture, tensor.shape)):
            return f"holds the tensor {name}, which its architecture has no place for"
    if sum(tensor.shape[0] for tensor in header.tensors.values() if len(tensor.shape) > 2) > MAX_EXPERT_MATRICES:
        return f"holds more than {MAX_EXPERT_MATRICES} matrices of experts"
    return None


def tokenizer_problem(header: GgufHeader) -> str | None:
    """Returns why transformers does not make the file's tokenizer rightly, as `unsupported` does; None when it does."""
    if not header.lengths.get("tokenizer.ggml.tokens"):
        return "holds none"
    split = header.metadata.get("tokenizer.ggml.pre", "default")
    known = _SPLITS.get(str(header.metadata["general.architecture"]), _QWEN_SPLITS)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        return f"splits texts as {split} does, which transformers does not read from GGUF"
    return None


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of a config.json that the file's metadata give."""
    gguf = str(header.metadata["general.architecture"])
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[gguf]],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": header.lengths.get("tokenizer.ggml.tokens", 0),
    }
    for key, field in _CONFIG.items():
        if (value := header.metadata.get(f"{gguf}.{key}")) is not None:
            config[field] = value
    return config


def tensors_of(header: GgufHeader, file: str) -> dict[str, TensorInfo]:
    """Returns the tensors by transformers' names, in the 16-bit type that they are quantized from.

    A stack of experts is listed as the single ones.
    """
    architecture = str(header.metadata["general.architecture"])
    dtype = dtype_of(header)
    return {
        name: TensorInfo(dtype, shape, file)
        for gguf_name, tensor in header.tensors.items()
        for name, shape in _names(gguf_name, architecture, tensor.shape)
    }


def dtype_of(header: GgufHeader) -> str:
    """Returns the type that the engine dequantizes to: F16 for a file of that, otherwise BF16."""
    types = {tensor.type for tensor in header.tensors.values()}
    return "F16" if "F16" in types and types <= {"F16", "F32"} else "BF16"


def _names(name: str, architecture: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields transformers' names for a tensor, with the shape of each; nothing for one that is unknown."""
    if name in _TOP:
        yield _TOP[name], shape
        return
    block = _BLOCK.fullmatch(name)
    if block is None:
        return
    layer, leaf = f"model.layers.{block['layer']}", block["leaf"]
    if leaf in _EXPERTS:
        for expert in range(shape[0] if len(shape) == 3 and shape[0] <= MAX_EXPERTS else 0):
            yield f"{layer}.mlp.experts.{expert}.{_EXPERTS[leaf]}.{block['suffix']}", shape[1:]
    elif target := (_LEAVES | _LEAVES_OF.get(architecture, {})).get(leaf):
        yield f"{layer}.{target}.{block['suffix']}", shape
