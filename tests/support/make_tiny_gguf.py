"""Turn tiny checkpoints into GGUF files, as llama.cpp's convert_hf_to_gguf.py does; run with the engine's python:

    python make_tiny_gguf.py CHECKPOINT TYPE FILE [CHECKPOINT TYPE FILE ...]

TYPE is a ggml type that the gguf package can write: F32, F16, BF16, Q8_0, Q4_0. Llama, Qwen 2, Qwen 3 and its mixture,
Phi 3 and Gemma 3 are known.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.torch import load_file

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
TOP = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA_LEAVES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def main() -> None:
    arguments = iter(sys.argv[1:])
    for checkpoint, type_name, file in zip(arguments, arguments, arguments, strict=True):
        write(Path(checkpoint), GGMLQuantizationType[type_name], Path(file))


def write(checkpoint: Path, kind: GGMLQuantizationType, file: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_bytes())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, architecture)
    _add_config(writer, config, architecture)
    _add_tokenizer(writer, checkpoint)
    for name, tensor in _tensors(checkpoint, config, architecture):
        data = tensor.float().numpy()
        tensor_kind = GGMLQuantizationType.F32 if data.ndim == 1 or "ffn_gate_inp" in name else kind
        writer.add_tensor(name, quantize(data, tensor_kind), raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_bytes())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in (tokenizer["model"]["vocab"] | special).items()}
    tokens = [by_id[index] for index in range(len(by_id))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    config = json.loads((checkpoint / "tokenizer_config.json").read_bytes())
    writer.add_bos_token_id(special[config["bos_token"]])
    writer.add_eos_token_id(special[config["eos_token"]])
    writer.add_pad_token_id(special[config["pad_token"]])
    if (template := checkpoint / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())


def _tensors(checkpoint: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(path)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", name):
            stack = stacks.setdefault(f"blk.{expert[1]}.{EXPERTS[expert[3]]}.weight", {})
            stack[int(expert[2])] = tensor
        else:
            yield _name(name, architecture), _value(name, tensor, config, architecture)
    for name, stack in stacks.items():
        yield name, torch.stack([stack[index] for index in sorted(stack)])


def _name(name: str, architecture: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{suffix}"
    block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    assert block, name
    leaves = LEAVES | GEMMA_LEAVES if architecture == "gemma3" else LEAVES
    return f"blk.{block[1]}.{leaves[block[2]]}.{suffix}"


def _value(name: str, tensor: torch.Tensor, config: dict[str, Any], architecture: str) -> torch.Tensor:
    """Llama's queries and keys go in the order of its first release; Gemma's norms have their one added."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if architecture != "llama" or not re.search(r"\.(q|k)_proj\.", name):
        return tensor
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


if __name__ == "__main__":
    main()
