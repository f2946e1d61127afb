"""What reads what in a model, by which SmoothQuant and AWQ scale an output and its readers against each other.

To scale an output without all that reads it would change what the model computes, so only what is known is smoothed:
llm-compressor's mappings, where they are right, and a few of this module's own.
tests/support/check_rounding.py shows for each architecture that smoothing alone changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compressed_tensors.utils import match_modules_set
from llmcompressor.modifiers.transform.awq.dynamic_mappings import AWQ_DYNAMIC_MAPPING_REGISTRY
from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model as awq_mappings
from llmcompressor.modifiers.transform.awq.mappings import AWQ_MAPPING_REGISTRY
from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY
from llmcompressor.modifiers.transform.smoothquant.dynamic_mappings import (
    get_layer_mappings_from_model as smoothquant_mappings,
)
from llmcompressor.modifiers.transform.smoothquant.utils import MAPPINGS_REGISTRY
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from bitmill_engine_kit.plan import Plan
from bitmill_engine_kit.protocol import EngineError, Treatment
from bitmill_engine_llmcompressor import moe


@dataclass(frozen=True)
class Reading:
    """A layer and those that read its output, by patterns or by exact names."""

    smooth: str
    readers: tuple[str, ...]
    hooked: str | None = None
    """AWQ's `activation_hook_target`: where the output is seen, when not at the first reader."""


_HEADS = Reading("re:.*input_layernorm$", ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"))
_MLP = Reading("re:.*post_attention_layernorm$", ("re:.*gate_proj$", "re:.*up_proj$"))
_JOINED_MLP = Reading("re:.*post_attention_layernorm$", ("re:.*gate_up_proj$",))
_VALUES = Reading("re:.*v_proj$", ("re:.*o_proj$",))
_UP = Reading("re:.*up_proj$", ("re:.*down_proj$",))

# Norms and what reads them, of architectures that llm-compressor does not know or, as to Gemma 2 and 3, has wrong in
# SmoothQuant: there the norm after attention feeds the residual, and one of its own the MLP.
_GEMMA2_MLP = Reading("re:.*pre_feedforward_layernorm$", ("re:.*gate_proj$", "re:.*up_proj$"))
_NORMS = {
    "GemmaForCausalLM": (_HEADS, _MLP),
    "Gemma2ForCausalLM": (_HEADS, _GEMMA2_MLP),
    "Gemma3ForCausalLM": (_HEADS, _GEMMA2_MLP),
    "Glm4ForCausalLM": (_HEADS, _JOINED_MLP),
    "StableLmForCausalLM": (_HEADS, _MLP),
}
# The same with the pairs of matrices that AWQ scales as well.
_PAIRS = {
    "GemmaForCausalLM": (_HEADS, _VALUES, _MLP, _UP),
    "Glm4ForCausalLM": (_HEADS, _VALUES, _JOINED_MLP, _UP),
    "StableLmForCausalLM": (_HEADS, _VALUES, _MLP, _UP),
}


def smoothquant(model: PreTrainedModel, plan: Plan) -> list[Reading]:
    """The norms of a model all of whose readers are W8A8_INT8, by exact names.

    Raises EngineError UNSUPPORTED_RECIPE when it is not known what reads what, or when there are none.
    """
    architecture = _known(model, {*MAPPINGS_REGISTRY, *SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY, *_NORMS}, "SmoothQuant")
    readings = _NORMS.get(architecture) or [
        Reading(smooth, tuple(balance)) for balance, smooth in smoothquant_mappings(model)
    ]
    return _resolve(model, plan, readings, "SmoothQuant", lambda treatment: treatment.scheme == "W8A8_INT8")


def awq(model: PreTrainedModel, plan: Plan) -> list[Reading]:
    """The layers of a model all of whose readers are rounded by AWQ, by exact names.

    Raises EngineError UNSUPPORTED_RECIPE when it is not known what reads what, or when there are none.
    """
    architecture = _known(model, {*AWQ_MAPPING_REGISTRY, *AWQ_DYNAMIC_MAPPING_REGISTRY, *_PAIRS}, "AWQ")
    readings = _PAIRS.get(architecture) or [
        Reading(each.smooth_layer, tuple(each.balance_layers), each.activation_hook_target)
        for each in awq_mappings(model)
    ]
    return _resolve(model, plan, readings, "AWQ", lambda treatment: treatment.algorithm == "AWQ")


def _known(model: PreTrainedModel, known: set[str], what: str) -> str:
    architecture = type(model).__name__
    # Of StableLM; its norm then feeds the MLP, too.
    if architecture not in known or getattr(model.config, "use_parallel_residual", False):
        message = f"what reads what in this {architecture} is not known, so {what} cannot scale it"
        raise EngineError("UNSUPPORTED_RECIPE", message, architecture=architecture)
    return architecture


def _resolve(
    model: PreTrainedModel, plan: Plan, readings: Iterable[Reading], what: str, wanted: Callable[[Treatment], bool]
) -> list[Reading]:
    """Readings by exact names, those only whose readers are all treated as wanted."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for reading in readings:
        for [smooth], *balance in match_modules_set(model, (reading.smooth, *reading.readers)):
            readers = tuple(names[module] for module in tree_leaves(balance))
            # A router reads what its experts read, and is scaled with them though it is not rounded.
            rounded = [name for name in readers if not moe.is_router(name)]
            if rounded and all(name in plan and wanted(plan[name].treatment) for name in rounded):
                found.append(Reading(names[smooth], readers, reading.hooked))
    if not found:
        message = f"{what} finds no layer in this {type(model).__name__} whose readers are all treated by it"
        raise EngineError("UNSUPPORTED_RECIPE", message)
    return found
