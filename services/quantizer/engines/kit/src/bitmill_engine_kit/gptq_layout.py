"""The classic GPTQ layout, as AutoGPTQ wrote it first: what of a recipe it has room for, and its config.json.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitmill_engine_kit.plan import AS_IT_IS, Plan, fused_groups
from bitmill_engine_kit.protocol import UNQUANTIZED, EngineError, Recipe, Treatment

FORMAT = "gptq"
"""The result's `format`, and vLLM's name of the quantization method."""

BITS = {"W4A16": 4, "W8A16": 8}
WEIGHT_SUFFIX = ".qweight"
SCALE_SUFFIX = ".scales"
"""Of the tensors that each quantized layer has."""

# `packed_modules_mapping` of vLLM's models, by the first member.
_FUSED_NAMES = {"q_proj": ("qkv_proj",), "gate_proj": ("gate_up_proj",)}


def require_supported(recipe: Recipe, engine: str, *, one_treatment: bool) -> None:
    """Raise EngineError UNSUPPORTED_RECIPE for what the layout, or vLLM's reader of it, has no room for.

    vLLM 0.32 serves it with symmetric weights of 4 and 8 bits (`TYPE_MAP` of AutoGPTQConfig) whose groups follow the
    stored order. `one_treatment`: the engine treats all layers alike that it does not leave as they are.
    """
    treatments = [recipe.treatment, *(rule.treatment for rule in recipe.rules)]
    for treatment in treatments[:1] + [each for each in treatments[1:] if each.scheme != UNQUANTIZED]:
        _require_treatment(treatment, engine)
        if one_treatment and treatment != recipe.treatment:
            raise _unsupported("rules", f"{engine} treats all layers of a model alike, or leaves them as they are")
    if recipe.activation_order == "GROUP":
        raise _unsupported("activation_order", "groups that follow the activation order are not served by vLLM")
    if recipe.kv_cache is not None:
        raise _unsupported("kv_cache", f"{engine} does not calibrate the KV cache")


def _require_treatment(treatment: Treatment, engine: str) -> None:
    if treatment.scheme not in BITS:
        raise _unsupported("scheme", f"{engine} does {' and '.join(BITS)}, not {treatment.scheme}")
    if treatment.algorithm != "GPTQ":
        raise _unsupported("algorithm", f"{engine} does GPTQ, not {treatment.algorithm}")
    if not treatment.symmetric:
        raise _unsupported("symmetric", "weights with zero points are not served by vLLM in this layout")


def _unsupported(field: str, message: str) -> EngineError:
    return EngineError("UNSUPPORTED_RECIPE", message, field=field)


def write_config(source_dir: Path, model_dir: Path, quantization: Mapping[str, Any], dtype: str) -> None:
    """Write config.json: the source's own, the data type that the weights have now, and how they are quantized.

    A `damp_percent` of 1, which the readers of this layout refuse though they have no use for it, is left out.
    """
    quantization = {key: value for key, value in quantization.items() if (key, value) != ("damp_percent", 1)}
    config = json.loads((source_dir / "config.json").read_bytes())
    # Its name in transformers 4, where the source has that.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config |= {key: dtype, "quantization_config": {"quant_method": FORMAT, **quantization}}
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def dtype_of(checkpoint_dir: Path) -> str:
    """The data type that a checkpoint's artifact gets: float16 stays, any other becomes bfloat16."""
    config = json.loads((checkpoint_dir / "config.json").read_bytes())
    return "float16" if "float16" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def dynamic_rules(plan: Plan, recipe: Recipe) -> dict[str, dict[str, int]]:
    """What of a plan is not as the recipe's own treatment, in the layout's terms; the first rule that matches counts.

    "-:" before a pattern leaves layers as they are, "+:" gives them other bits or another group size. The patterns
    also have vLLM's names of what it runs as one matrix, since it looks for those.
    """
    rules: dict[str, dict[str, int]] = {}
    for group in fused_groups(plan):
        treatment = plan[group[0]].treatment
        if treatment == recipe.treatment:
            continue
        parent = group[0].rpartition(".")[0]
        leaves = [name.rpartition(".")[2] for name in group]
        pattern = rf"^{re.escape(parent)}\.({'|'.join([*leaves, *_FUSED_NAMES.get(leaves[0], ())])})$"
        if treatment == AS_IT_IS:
            rules[f"-:{pattern}"] = {}
        else:
            rules[f"+:{pattern}"] = {"bits": BITS[treatment.scheme], "group_size": treatment.group_size}
    return rules


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """How the layers are stored, as config.json says it."""
    treatment = recipe.treatment
    return {
        "bits": BITS[treatment.scheme],
        "group_size": treatment.group_size,
        "damp_percent": recipe.dampening_frac,
        # The groups are those of the stored order, whatever order the columns were rounded in.
        "desc_act": False,
        "static_groups": recipe.activation_order == "STATIC",
        "sym": treatment.symmetric,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
