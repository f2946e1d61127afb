"""SmoothQuant and AWQ: channels are scaled before they are rounded, in the matrix that reads them and what feeds it.

llm-compressor knows which layers read what for many architectures; only those are smoothed here, since to scale an
output without all that reads it would change what the model computes.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from bitmill_engine_kit.plan import Plan
from compressed_tensors.utils import match_modules_set
from llmcompressor.core import Event, State
from llmcompressor.modeling import offset_norm
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.dynamic_mappings import AWQ_DYNAMIC_MAPPING_REGISTRY
from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model as awq_mappings
from llmcompressor.modifiers.transform.awq.mappings import AWQ_MAPPING_REGISTRY, AWQMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import MINIMUM_SMOOTHING_SCALE
from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY
from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import (
    get_layer_mappings_from_model as smoothquant_mappings,
)
from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from bitmill_engine_kit.protocol import EngineError, Treatment
from bitmill_engine_llmcompressor import moe

OnScales = Callable[[list[torch.nn.Module], torch.Tensor], None]
"""Called with modules and the factors, one for each channel, by which their inputs have just been divided."""

# Their norms after attention feed the residual and not the MLP, which llm-compressor 0.14's SmoothQuant overlooks and
# its AWQ does not.
_NORM_BEFORE_MLP = {"Gemma2ForCausalLM": "pre_feedforward_layernorm", "Gemma3ForCausalLM": "pre_feedforward_layernorm"}
_NORM_AFTER_ATTENTION = "post_attention_layernorm"

Mapping = tuple[str, tuple[str, ...]]
"""A layer, and those that read its output; exact names."""


class SmoothQuant(SmoothQuantModifier):  # type: ignore[misc]
    """llm-compressor's SmoothQuant, which tells the scales, and leaves alone a channel that was never active."""

    _on_scales: OnScales = PrivateAttr()

    def tell(self, on_scales: OnScales) -> SmoothQuant:
        """Set the receiver of the scales."""
        self._on_scales = on_scales
        return self

    def _calculate_smoothing_scales(
        self, balance_layers: list[torch.nn.Module], activation_scales: torch.Tensor
    ) -> torch.Tensor:
        if not activation_scales.isfinite().all():
            smooth = next(each for each in self.resolved_mappings_ if each.balance_layers is balance_layers)
            raise _non_finite(smooth.smooth_name)
        scales = super()._calculate_smoothing_scales(balance_layers, activation_scales)
        scales = scales.clamp(min=MINIMUM_SMOOTHING_SCALE).where(activation_scales > 0, torch.ones_like(scales))
        self._on_scales(balance_layers, scales)
        return scales


class AWQ(AWQModifier):  # type: ignore[misc]
    """llm-compressor's AWQ, which takes activations that are not finite for the error that they are."""

    def on_sequential_epoch_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Search the best scales of the layers just calibrated, and apply them."""
        for name, (total, _) in self._smooth_activation_stats.items():
            if not total.isfinite().all():
                raise _non_finite(name)
        with _pinning_where_it_can():
            super().on_sequential_epoch_end(state, event, **kwargs)


def _pinning_where_it_can() -> contextlib.AbstractContextManager[object]:
    """llm-compressor 0.14 pins memory for its transfers to a GPU, and fails where there is none."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return patch.object(IntermediatesCache, "pin_memory", lambda *_: None)


def _non_finite(name: str) -> EngineError:
    message = f"the outputs of {name} were not finite numbers while it was calibrated"
    return EngineError("NON_FINITE_ACTIVATIONS", message, tensor=name)


def smoothquant(model: PreTrainedModel, plan: Plan, strength: float) -> SmoothQuant:
    """SmoothQuant for the layers of the plan that are W8A8_INT8.

    Raises EngineError UNSUPPORTED_RECIPE when llm-compressor does not know what reads what in such a model.
    """
    architecture = type(model).__name__
    known = MAPPINGS_REGISTRY.keys() | SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY.keys()
    _require_known(architecture, known, "SmoothQuant", "smoothing_strength 0 leaves it out")
    patterns = [(_norm(smooth, architecture), tuple(balance)) for balance, smooth in smoothquant_mappings(model)]
    mappings = _resolve(model, plan, patterns, lambda treatment: treatment.scheme == "W8A8_INT8")
    _require_some(mappings, "SmoothQuant", architecture)
    return SmoothQuant(smoothing_strength=strength, mappings=[(list(balance), smooth) for smooth, balance in mappings])


def awq(model: PreTrainedModel, plan: Plan, offload_device: str) -> AWQ:
    """AWQ for the layers of the plan that it scales; `offload_device` keeps the activations that it searches with.

    Raises EngineError UNSUPPORTED_RECIPE when llm-compressor does not know what reads what in such a model.
    """
    architecture = type(model).__name__
    known = AWQ_MAPPING_REGISTRY.keys() | AWQ_DYNAMIC_MAPPING_REGISTRY.keys()
    _require_known(architecture, known, "AWQ", "GPTQ is done for every architecture")
    mappings = [
        AWQMapping(smooth, list(balance), mapping.activation_hook_target)
        for mapping in awq_mappings(model)
        for smooth, balance in _resolve(
            model,
            plan,
            [(mapping.smooth_layer, tuple(mapping.balance_layers))],
            lambda treatment: treatment.algorithm == "AWQ",
        )
    ]
    _require_some(mappings, "AWQ", architecture)
    return AWQ(mappings=mappings, offload_device=torch.device(offload_device))


@contextlib.contextmanager
def exact_norms(*, smoothing: bool) -> Iterator[None]:
    """Keep the norms of models whose norms scale by one plus their weight, as Gemma's do, as exact as they are.

    While it works, llm-compressor 0.14 holds that sum in the weight's 16 bits, which loses most of a small weight's
    digits. Here the sum is in 32 bits, and is made only when something is to be smoothed.
    """
    if not smoothing:
        # By its name: the package has a function of the same one.
        oneshot = importlib.import_module("llmcompressor.entrypoints.oneshot")
        with patch.object(oneshot, "norm_calibration_context", contextlib.nullcontext):
            yield
        return
    in_16_bits = offset_norm.CalibrationOffsetNorm.__init__

    def in_32_bits(norm: Any, original: torch.nn.Module, config: Any) -> None:
        in_16_bits(norm, original, config)
        norm.weight = torch.nn.Parameter(1.0 + original.weight.data.float())

    with patch.object(offset_norm.CalibrationOffsetNorm, "__init__", in_32_bits):
        yield


def _norm(pattern: str, architecture: str) -> str:
    return pattern.replace(_NORM_AFTER_ATTENTION, _NORM_BEFORE_MLP.get(architecture, _NORM_AFTER_ATTENTION))


def _resolve(
    model: PreTrainedModel, plan: Plan, patterns: list[Mapping], wanted: Callable[[Treatment], bool]
) -> list[Mapping]:
    """The mappings by exact names, those only whose readers are all treated as wanted."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for smooth_pattern, balance_patterns in patterns:
        for [smooth], *balance in match_modules_set(model, (smooth_pattern, *balance_patterns)):
            readers = tuple(names[module] for module in tree_leaves(balance))
            # A router reads what its experts read, and is scaled with them though it is not rounded.
            rounded = [name for name in readers if not moe.is_router(name)]
            if rounded and all(name in plan and wanted(plan[name].treatment) for name in rounded):
                found.append((names[smooth], readers))
    return found


def _require_known(architecture: str, known: Any, what: str, instead: str) -> None:
    if architecture not in known:
        message = f"what reads what in a {architecture} is not known to {what}; {instead}"
        raise EngineError("UNSUPPORTED_RECIPE", message, architecture=architecture)


def _require_some(mappings: list[Any], what: str, architecture: str) -> None:
    if not mappings:
        message = f"{what} finds no norm in this {architecture} whose readers are all treated by it"
        raise EngineError("UNSUPPORTED_RECIPE", message, architecture=architecture)
