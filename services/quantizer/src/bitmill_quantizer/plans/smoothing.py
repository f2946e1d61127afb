"""Whether SmoothQuant and AWQ find something to scale in a model: norms whose readers are all treated by them. Pure.

The rules are those of the engine's `smoothing_mappings.py`, which has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.recipes import Algorithm, Recipe, Scheme
from bitmill_quantizer.plans.layers import has_experts
from bitmill_quantizer.plans.problems import Problem, wrong_field
from bitmill_quantizer.plans.treatments import LayerTreatments

_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_MLP = ("gate_proj", "up_proj", "gate_up_proj")
# One norm feeds both in these.
_PARALLEL = ("CohereForCausalLM", "Cohere2ForCausalLM")
# llm-compressor 0.14 knows what reads what for AWQ in every other supported architecture.
_WITHOUT_AWQ = ("MixtralForCausalLM",)
_DECODER_LAYER = re.compile(r".*\blayers\.\d+")


def smoothing_problems(checkpoint: Checkpoint, treated: LayerTreatments, recipe: Recipe) -> Iterator[Problem]:
    """Yields each field of a recipe that asks to scale what cannot be scaled."""
    architecture = checkpoint.architecture
    is_known = not checkpoint.config.get("use_parallel_residual")
    field = "spec.recipe.smoothing_strength"
    if recipe.smoothing_strength > 0 and treated.quantized:
        if not is_known:
            text = f"must be 0: one norm of this {architecture} feeds attention and MLP, which SmoothQuant cannot scale"
            yield wrong_field(field, "UNSUPPORTED_SMOOTHING", text)
        elif not _smooths(architecture, treated):
            text = "must be 0: there is no norm all of whose readers (query, key and value; gate and up) are W8A8_INT8"
            yield wrong_field(field, "UNSUPPORTED_SMOOTHING", text)
    if is_known and architecture not in _WITHOUT_AWQ:
        return
    asked = {each.algorithm for each in treated.quantized.values()}
    for path, treatment in (
        ("spec.recipe", recipe.treatment),
        *((f"spec.recipe.rules[{index}]", rule.treatment) for index, rule in enumerate(recipe.rules)),
    ):
        if treatment.algorithm is Algorithm.AWQ and Algorithm.AWQ in asked:
            text = f"AWQ is not done for this {architecture}; GPTQ and RTN are"
            yield wrong_field(f"{path}.algorithm", "UNSUPPORTED_ALGORITHM", text)


def _smooths(architecture: str, treated: LayerTreatments) -> bool:
    return any(
        all(treated.treatments[name].scheme is Scheme.W8A8_INT8 for name in readers)
        for readers in _readers(architecture, tuple(treated.treatments))
    )


def _readers(architecture: str, names: Sequence[str]) -> Iterator[list[str]]:
    """Yields the layers that read each norm which SmoothQuant scales: of a mixture those of attention alone."""
    leaves = _HEADS if has_experts(names) else (*_HEADS, *_MLP)
    readings: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        leaf, layer = name.rpartition(".")[2], _DECODER_LAYER.match(name)
        if leaf in leaves and layer is not None:
            part = architecture not in _PARALLEL and leaf in _HEADS
            readings.setdefault((layer[0], part), []).append(name)
    yield from readings.values()
