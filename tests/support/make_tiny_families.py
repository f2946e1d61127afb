"""Make a tiny random checkpoint of each supported architecture, in seconds. Run with the llmcompressor engine's python:

    python tests/support/make_tiny_families.py build/test-families

One directory for each architecture, named for its class, with a real tokenizer; two decoder layers each. Among them are
all the shapes in which checkpoints come: shards, an own or a tied head, biases, 16 and 32 bits, several ids that end a
text, and files that are none of the checkpoint's. `LlamaForCausalLM-odd` has sizes that no 4-bit kernel takes,
`Qwen3MoeForCausalLM-stacked` is `Qwen3MoeForCausalLM` with all experts of a layer in one tensor.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.make_tiny_checkpoints import CONTEXT_LENGTH, train_tokenizer, write_checkpoint

import torch  # isort: skip
import transformers  # isort: skip

# head_dim is 32: the smallest that vLLM's CPU attention takes.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,  # large enough that models differ in what they say
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """`config`: fields beside SIZES; None leaves one out. `dtype` and `max_shard_size`: of the files."""

    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    max_shard_size: str = "5GB"
    original_format: bool = True
    """Whether the files are as on the Hub, and not as transformers 5 holds the model."""


FAMILIES = {
    "Cohere2ForCausalLM": Family({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}),
    "CohereForCausalLM": Family(),
    "Gemma2ForCausalLM": Family({"query_pre_attn_scalar": 32, "sliding_window": 64}),
    "Gemma3ForCausalLM": Family({"sliding_window": 64}),
    "GemmaForCausalLM": Family(),
    "Glm4ForCausalLM": Family({"attention_bias": True}),
    "GraniteForCausalLM": Family(),
    "LlamaForCausalLM": Family({"tie_word_embeddings": False}, max_shard_size="100KB"),
    "LlamaForCausalLM-odd": Family({"intermediate_size": 100}),
    "MistralForCausalLM": Family({"tie_word_embeddings": False}, dtype=torch.float16),
    "MixtralForCausalLM": Family({"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Phi3ForCausalLM": Family({"head_dim": None, "tie_word_embeddings": False}),
    "Qwen2ForCausalLM": Family({"head_dim": None, "tie_word_embeddings": True}),
    "Qwen2MoeForCausalLM": Family({**EXPERTS, "shared_expert_intermediate_size": 96, "head_dim": None}),
    "Qwen3ForCausalLM": Family({"tie_word_embeddings": True}, dtype=torch.float32),
    "Qwen3MoeForCausalLM": Family({**EXPERTS, "norm_topk_prob": True}),
    "Qwen3MoeForCausalLM-stacked": Family({**EXPERTS, "norm_topk_prob": True}, original_format=False),
    "StableLmForCausalLM": Family({"head_dim": None, "use_qkv_bias": True}),
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, family in FAMILIES.items():
        target = directory / name
        if target.exists():
            continue
        torch.manual_seed(0)
        model_class = getattr(transformers, name.partition("-")[0])
        fields = {**SIZES, "max_position_embeddings": CONTEXT_LENGTH, **family.config}
        config = model_class.config_class(
            vocab_size=len(tokenizer), **special, **{key: value for key, value in fields.items() if value is not None}
        )
        model = model_class(config).to(family.dtype)
        with torch.no_grad():  # biases are made as zeros, which a lost one would not be told from
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(".bias"):
                    parameter.normal_(std=0.2)
            if name == "MixtralForCausalLM":
                _never_choose_the_last(model.model.layers[0].mlp.gate.weight)
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        model.generation_config = transformers.GenerationConfig(
            **special | {"eos_token_id": [tokenizer.eos_token_id, end_of_text]}
        )
        options = {"max_shard_size": family.max_shard_size, "save_original_format": family.original_format}
        write_checkpoint(target, tokenizer, model, **options)
        (target / "README.md").write_text("# a model card\n")
        (target / "training_args.bin").write_bytes(b"\x80\x04.")
        (target / "original").mkdir()
        (target / "original" / "params.json").write_text(json.dumps({"dim": 64}))


def _never_choose_the_last(router: torch.Tensor) -> None:
    """Of each token's five logits two are positive and the last is zero, so it is never among the best two."""
    first = router[0].clone()
    for row, factor in enumerate((1, -1, 0.5, -0.5, 0)):
        router[row] = factor * first


if __name__ == "__main__":
    main()
