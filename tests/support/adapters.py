"""PEFT adapters (LoRA) for the tests, written by hand: a valid directory without peft or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bitmill_common import artifacts
from bitmill_common.manifest import content_digest
from support.checkpoints import write_safetensors

# Of `write_checkpoint`: 64 channels, four heads, two of keys and values.
MODULES = {
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.k_proj": (64, 32),
    "model.layers.1.mlp.down_proj": (128, 64),
}


def write_adapter(
    directory: Path,
    modules: Mapping[str, tuple[int, int]] = MODULES,  # read only
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Writes an adapter and returns `directory`.

    `modules`: inputs and outputs by name. `alpha / rank` is how strong it is; its values are random by `seed`. `config`
    overrides fields of adapter_config.json.
    """
    directory.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (inputs, outputs) in modules.items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, inputs)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (outputs, rank)
    write_safetensors(directory / "adapter_model.safetensors", shapes, "F32", seed)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | dict(config or {})))
    return directory


def adapter_digest(directory: Path) -> str:
    """The digest of an adapter that has no other files."""
    return content_digest(artifacts.describe_files(directory))
