"""Writing the model directory, and the last look at what was written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_llmcompressor import moe
from bitmill_engine_llmcompressor.checkpoints import copy_companions

# What a served model divides by, or multiplies with what it has divided: a zero makes NaN, or a layer that is all zero.
_SCALES = ("_scale",)
# Exponents of two, biased by 127; 255 is NaN (OCP Microscaling Formats 1.0, section 5.4.1).
_E8M0_NAN = 255


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source_dir: Path, output_dir: Path) -> None:
    """Write the model directory: compressed weights, patched config, and the source's own companions."""
    output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output_dir, max_shard_size="5GB")
    for pattern in ("*.py", "generation_config.json", "recipe.yaml"):
        for path in output_dir.glob(pattern):
            path.unlink()
    moe.name_in_both_ways(model, output_dir)
    copy_companions(source_dir, output_dir, tokenizer)


def count_quantized_modules(model_dir: Path) -> int:
    """Count the layers that really are quantized in the saved files, having looked at every number in them.

    Raises EngineError NON_FINITE_WEIGHTS or ZERO_SCALE, naming the tensor: such an artifact must not be published.
    """
    quantized = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                _require_sound(name, tensors.get_tensor(name))
                quantized += name.endswith(".weight_scale")
    return quantized


def _require_sound(name: str, tensor: torch.Tensor) -> None:
    is_scale = name.endswith(_SCALES)
    if is_scale and tensor.dtype == torch.uint8:
        finite, zero = bool((tensor != _E8M0_NAN).all()), False
    elif tensor.is_floating_point():
        # Eight-bit floats know no comparison.
        numbers = tensor.float() if tensor.element_size() == 1 else tensor
        finite, zero = bool(numbers.isfinite().all()), is_scale and bool((numbers == 0).any())
    else:
        return
    if not finite:
        raise EngineError("NON_FINITE_WEIGHTS", f"{name} holds a NaN or an infinity", tensor=name)
    if zero:
        raise EngineError(
            "ZERO_SCALE", f"{name} holds a zero, since what it scales is too small for its type", tensor=name
        )
