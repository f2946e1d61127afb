"""From a plan to llm-compressor's terms: one quantization scheme for each treatment, and the layers that get it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from compressed_tensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    preset_name_to_scheme,
)
from transformers import PreTrainedModel

from bitmill_engine_kit.plan import AS_IT_IS, Plan
from bitmill_engine_kit.protocol import ADAPTIVE, PER_CHANNEL, UNQUANTIZED, EngineError, Recipe, Treatment
from bitmill_engine_llmcompressor import moe

TARGET = "Linear"

# The algorithms of each scheme. Of the float grids llm-compressor's GPTQ and AWQ are not offered: nobody has shown that
# vLLM's users gain by them.
ALGORITHMS = {
    "W4A16": ("GPTQ", "AWQ", "RTN"),
    "W8A16": ("GPTQ", "RTN"),
    "W8A8_INT8": ("GPTQ", "RTN"),
    "FP8_DYNAMIC": ("RTN",),
    "FP8_STATIC": ("RTN",),
    "FP8_BLOCK": ("RTN",),
    "NVFP4A16": ("RTN",),
    "MXFP4A16": ("RTN",),
    UNQUANTIZED: ("NONE",),
    ADAPTIVE: ("NONE",),
}

# compressed-tensors' names of the schemes whose scales have one layout.
_PRESETS = {
    "W8A8_INT8": "INT8",
    "FP8_DYNAMIC": "FP8_DYNAMIC",
    "FP8_STATIC": "FP8",
    "FP8_BLOCK": "FP8_BLOCK",
    "NVFP4A16": "NVFP4A16",
    "MXFP4A16": "MXFP4A16",
}
_BITS = {"W4A16": 4, "W8A16": 8}
_ACTIVATION_ORDERS = {"NONE": None, "STATIC": ActivationOrdering.STATIC}
_CALIBRATED_ALGORITHMS = ("GPTQ", "AWQ")
_CALIBRATED_SCHEMES = ("FP8_STATIC",)

KV_CACHE = QuantizationArgs(
    num_bits=8,
    type=QuantizationType.FLOAT,
    strategy=QuantizationStrategy.TENSOR,
    symmetric=True,
    dynamic=False,
    # The extremes of all samples, as for FP8_STATIC's activations; the default is a moving average of them.
    observer="static_minmax",
)
"""FP8 keys and values, with one calibrated scale each for every layer."""


def require_supported(recipe: Recipe) -> None:
    """Raise EngineError UNSUPPORTED_RECIPE for what this engine, or the vLLM that serves, does not do."""
    for treatment in _treatments(recipe):
        if treatment.algorithm not in ALGORITHMS[treatment.scheme]:
            raise _unsupported(f"{treatment.algorithm} is not done for {treatment.scheme}")
        if not treatment.symmetric and treatment.scheme != "W4A16":
            raise _unsupported(f"asymmetric {treatment.scheme} has no kernel; only W4A16 may be asymmetric")
    if recipe.activation_order not in _ACTIVATION_ORDERS:
        raise _unsupported(
            f"activation order {recipe.activation_order} is no longer read by vLLM from this format; STATIC costs "
            "nothing when served"
        )
    if recipe.smoothing_strength and all(each.scheme != "W8A8_INT8" for each in _treatments(recipe)):
        raise _unsupported("SmoothQuant is for W8A8_INT8; smoothing_strength must be 0")


def needs_calibration(recipe: Recipe) -> bool:
    """Whether the recipe looks at data."""
    return (
        recipe.adaptive is not None
        or recipe.kv_cache is not None
        or recipe.smoothing_strength > 0
        or any(
            treatment.algorithm in _CALIBRATED_ALGORITHMS or treatment.scheme in _CALIBRATED_SCHEMES
            for treatment in _treatments(recipe)
        )
    )


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Every Linear layer by name but the output head and a mixture's routers, which stay as they are."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not moe.is_router(name)
    }


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """(output, input) sizes of those layers."""
    return {name: (layer.out_features, layer.in_features) for name, layer in linear_layers(model).items()}


def quantization_scheme(treatment: Treatment, activation_order: str, targets: Iterable[str]) -> QuantizationScheme:
    """What llm-compressor calls a treatment: how weights and activations of the targets are stored."""
    if preset := _PRESETS.get(treatment.scheme):
        scheme = preset_name_to_scheme(preset, list(targets))
    else:
        scheme = QuantizationScheme(targets=list(targets), weights=_integer_weights(treatment))
    if treatment.algorithm == "GPTQ":
        scheme.weights.actorder = _ACTIVATION_ORDERS[activation_order]
    return scheme


def config_groups(plan: Plan, activation_order: str) -> dict[str, QuantizationScheme]:
    """A scheme for each treatment in the plan, by the names that the artifact's config will have."""
    treated: dict[Treatment, list[str]] = {}
    for name, layer in plan.items():
        if layer.treatment != AS_IT_IS:
            treated.setdefault(layer.treatment, []).append(name)
    return {
        f"group_{index}": quantization_scheme(
            treatment, activation_order, [TARGET] if len(treated) == 1 else _targets(treatment, plan)
        )
        for index, treatment in enumerate(treated)
    }


def no_layers() -> QuantizationScheme:
    """The scheme of a recipe that treats the KV cache only."""
    return QuantizationScheme(targets=[])


def ignored(model: PreTrainedModel, plan: Plan) -> list[str]:
    """Names of the Linear layers that no group may take, though "Linear" names them too."""
    quantized = {name for name, layer in plan.items() if layer.treatment != AS_IT_IS}
    linears = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return [name for name in linears if name not in quantized]


def _treatments(recipe: Recipe) -> Iterator[Treatment]:
    yield recipe.treatment
    yield from (rule.treatment for rule in recipe.rules)
    yield from recipe.adaptive.candidates if recipe.adaptive else ()


def _unsupported(problem: str) -> EngineError:
    return EngineError("UNSUPPORTED_RECIPE", problem)


def _integer_weights(treatment: Treatment) -> QuantizationArgs:
    bits, grouped = _BITS[treatment.scheme], treatment.group_size != PER_CHANNEL
    return QuantizationArgs(
        num_bits=bits,
        # With 15 steps it pays to clip outliers: scales by least squared error instead of by the extremes took the
        # divergence of SmolLM2-135M (group size 64, 32 samples of 512 tokens) from 0.21 to 0.13 nats.
        observer="memoryless_mse" if bits == 4 else None,
        type=QuantizationType.INT,
        strategy=QuantizationStrategy.GROUP if grouped else QuantizationStrategy.CHANNEL,
        group_size=treatment.group_size if grouped else None,
        symmetric=treatment.symmetric,
    )


def _targets(treatment: Treatment, plan: Plan) -> list[str]:
    """Patterns for the layers that get a treatment, where some get another.

    One regular expression for all layers of one kind, "q_proj" for example, of which no other treatment has any; exact
    names for the rest. Layers that stay as they are need no care: the config's ignore list goes first.
    """
    own = [name for name, layer in plan.items() if layer.treatment == treatment]
    others = {_kind(name) for name, layer in plan.items() if layer.treatment not in (treatment, AS_IT_IS)}
    kinds = list(dict.fromkeys(kind for name in own if (kind := _kind(name)) not in others))
    leaves = [re.escape(kind) for kind in kinds if kind != _EXPERTS]
    # Experts have layers of the same names, and files may name them otherwise.
    outside = r"(?!.*\.experts\.)" if any(_kind(name) == _EXPERTS for name in plan) else ""
    patterns = [rf"re:{outside}.*\.({'|'.join(leaves)})$"] if leaves else []
    patterns += [r"re:.*\.experts\.\d+\..*"] if _EXPERTS in kinds else []
    return patterns + [name for name in own if _kind(name) in others]


_EXPERTS = "experts"


def _kind(name: str) -> str:
    return _EXPERTS if moe.row_name(name) != name else name.rpartition(".")[2]
