"""Mixtures of experts: a Linear layer for each matrix of each expert, which experts the router chose, and their names.

transformers 5 holds the experts of a decoder layer in two tensors of three dimensions, which no algorithm here rounds;
llm-compressor's linear experts compute the same, and let every token of the calibration pass through every expert.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from llmcompressor.modeling.moe.conversion_mappings import (
    get_linearize_load_mappings,
    has_linearize_load_mappings,
    patch_moe_mappings,
    set_save_conversion_mapping,
)
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes, linearize_moe
from transformers import PreTrainedModel, modeling_utils
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<leaf>\w+)")
_ROUTER = re.compile(r".*\.(gate|shared_expert_gate)")


def row_name(name: str) -> str:
    """The name of a layer's row in `modules`: the experts of a decoder layer share one."""
    expert = _EXPERT.fullmatch(name)
    return f"{expert['experts']}.*.{expert['leaf']}" if expert else name


def is_router(name: str) -> bool:
    """Whether a Linear layer chooses experts; vLLM keeps those as they are in the source."""
    return _ROUTER.fullmatch(name) is not None


@contextlib.contextmanager
def linear_experts(model_type: str) -> Iterator[None]:
    """Within it transformers builds and loads linear experts from a checkpoint that stores each expert by itself.

    llm-compressor's `load_quantizable_moe`, for calls that also ask for the loading info. What is changed in
    transformers is put back, and a class is replaced in its own module only: transformers' `apply_patches` looks
    through all of its modules, and so imports libraries for images that are not installed.
    """
    with _mixtral_mapping():
        if not has_linearize_load_mappings(model_type):
            yield
            return
        experts, mapping, _ = get_linearize_load_mappings(model_type)
    original = get_checkpoint_conversion_mapping(model_type)
    linear = LinearExperts2D.get_linear_experts_cls(experts)
    replaced = patch.object(sys.modules[experts.__module__], experts.__name__, linear)
    register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)
    try:
        # Called around the building of the model; its weights are initialized by the classes that there were.
        with patch.object(modeling_utils, "apply_patches", lambda: replaced):
            yield
    finally:
        register_checkpoint_conversion_mapping(model_type, original, overwrite=True)


def linearize(model: PreTrainedModel) -> PreTrainedModel:
    """Turn experts that are stacked still into linear ones, and have all saved by the names that the model's files use.

    A model without experts is left alone.
    """
    if get_non_linearized_moes(model):
        linearize_moe(model)
    model_type = model.config.model_type
    with _mixtral_mapping():
        if _has_linear_experts(model) and has_linearize_load_mappings(model_type):
            _, _, mapping = get_linearize_load_mappings(model_type)
            set_save_conversion_mapping(model, mapping)
    return model


def _mixtral_mapping() -> contextlib.AbstractContextManager[object]:
    """llm-compressor's table has no names for Mixtral's experts."""
    mapping: contextlib.AbstractContextManager[object] = patch_moe_mappings(
        "mixtral",
        [
            WeightRenaming(rf"\.experts\.(\d+)\.{file}\.", rf".experts.\1.{name}.")
            for file, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
        ],
        remove_targets=[".experts.gate_up_proj", ".experts.down_proj"],
    )
    return mapping


def _has_linear_experts(model: PreTrainedModel) -> bool:
    return any(isinstance(module, LinearExperts2D) for module in model.modules())


class RoutedTokens:
    """Counts the tokens that routers send to each expert, while the context is open."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = {name: module for name, module in model.named_modules() if isinstance(module, LinearExperts2D)}
        self._counts: dict[str, torch.Tensor] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> RoutedTokens:
        for name, module in self._experts.items():
            hook = module.register_forward_pre_hook(self._counter(name), with_kwargs=True)
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _counter(self, name: str) -> Any:
        def count(module: LinearExperts2D, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            counted = torch.bincount(chosen.flatten(), minlength=module.num_experts)
            self._counts[name] = self._counts[name] + counted if name in self._counts else counted

        return count

    def unreached(self) -> list[str]:
        """Experts that no token was sent to, in the model's order; none where no sample went through at all."""
        return [
            f"{name}.{expert}"
            for name, counts in self._counts.items()
            for expert, count in enumerate(counts.tolist())
            if not count
        ]


def name_in_both_ways(model: PreTrainedModel, model_dir: Path) -> None:
    """Name modules in the saved quantization_config as its files do and as transformers does, where the two differ.

    vLLM goes by the names of the files, transformers by those of its modules; Mixtral's differ. compressed-tensors
    writes the former as far as it can, which leaves "experts.0.gate_proj" where the files have "experts.0.w1".
    """
    path = model_dir / "config.json"
    config = json.loads(path.read_bytes())
    quantization = config.get("quantization_config") or {}
    groups = quantization.get("config_groups", {}).values()
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    known: dict[str, tuple[str, str]] = {}
    for name in names:
        written, file = _saved_name(model, name), _saved_name(model, f"{name}.weight").removesuffix(".weight")
        if file != name:
            known |= dict.fromkeys((name, written), (file, name))
    for listed in filter(None, [quantization.get("ignore"), *(group["targets"] for group in groups)]):
        both = (known.get(name, (name,)) for name in listed)
        listed[:] = dict.fromkeys(each for names in both for each in names)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _saved_name(model: PreTrainedModel, name: str) -> str:
    [saved] = revert_weight_conversion(model, {name: torch.empty(0)})
    return str(saved)
