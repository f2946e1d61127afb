"""A recipe that asks SmoothQuant or AWQ for what they cannot do is refused before the engine starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.recipes import Algorithm, ModuleRule, Recipe, Scheme, Treatment
from bitmill_quantizer.plans.smoothing import smoothing_problems
from bitmill_quantizer.plans.treatments import treat

LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
EXPERTS = (*LEAVES[:4], *(f"mlp.experts.{expert}.{leaf}" for expert in range(2) for leaf in ("gate_proj", "up_proj")))
HEADS = r"re:.*\.(q|k|v)_proj"
GATED = r"re:.*\.(gate|up)_proj"
INT8 = Recipe(Scheme.W8A8_INT8, 0, smoothing_strength=0.8)
AWQ = Recipe(Scheme.W4A16, 32, algorithm=Algorithm.AWQ)


def fields(
    recipe: Recipe, architecture: str = "LlamaForCausalLM", leaves: tuple[str, ...] = LEAVES, **config: object
) -> list[str]:
    """The wrong fields of a recipe for a model of two decoder layers."""
    layers = {f"model.layers.{index}.{leaf}": (64, 64) for index in range(2) for leaf in leaves}
    treated = treat(layers, recipe)
    assert treated.problems == ()
    checkpoint = Checkpoint(dict(config), architecture, {}, (), 0, 0, None)
    return [problem.field for problem in smoothing_problems(checkpoint, treated, recipe)]


@pytest.mark.parametrize(
    ("ignore", "architecture", "leaves", "smooths"),
    [
        ((), "LlamaForCausalLM", LEAVES, True),
        ((HEADS,), "LlamaForCausalLM", LEAVES, True),
        ((GATED,), "LlamaForCausalLM", LEAVES, True),
        ((HEADS, GATED), "LlamaForCausalLM", LEAVES, False),
        ((r"re:.*layers\.0\.",), "CohereForCausalLM", LEAVES, True),
        ((HEADS,), "CohereForCausalLM", LEAVES, False),
        ((GATED,), "Cohere2ForCausalLM", LEAVES, False),
        ((r"re:.*experts",), "Qwen3MoeForCausalLM", EXPERTS, True),
        ((HEADS,), "Qwen3MoeForCausalLM", EXPERTS, False),
    ],
)
def test_smoothquant_needs_a_norm_all_of_whose_readers_are_int8(
    ignore: tuple[str, ...], architecture: str, leaves: tuple[str, ...], smooths: bool
) -> None:
    """Its default is the server's: a caller must hear that it cannot be, before anything runs."""
    recipe = replace(INT8, ignore=("lm_head", *ignore))
    assert fields(recipe, architecture, leaves) == ([] if smooths else ["spec.recipe.smoothing_strength"])
    assert fields(replace(recipe, smoothing_strength=0.0), architecture, leaves) == []


def test_a_norm_that_feeds_attention_and_mlp_is_not_scaled() -> None:
    """As StableLM's does with that field of its configuration."""
    assert fields(INT8, "StableLmForCausalLM", use_parallel_residual=True) == ["spec.recipe.smoothing_strength"]
    assert fields(AWQ, "StableLmForCausalLM", use_parallel_residual=True) == ["spec.recipe.algorithm"]
    assert fields(AWQ, "StableLmForCausalLM", use_parallel_residual=False) == []


def test_awq_is_not_done_for_mixtral() -> None:
    rule = ModuleRule("re:.*self_attn", Treatment(Scheme.W4A16, Algorithm.AWQ, 32))
    assert fields(AWQ, "MixtralForCausalLM", EXPERTS) == ["spec.recipe.algorithm"]
    assert fields(replace(INT8, smoothing_strength=0.0, rules=(rule,)), "MixtralForCausalLM", EXPERTS) == [
        "spec.recipe.rules[0].algorithm"
    ]
    others = ModuleRule("re:.*", Treatment(Scheme.W4A16, Algorithm.GPTQ, 32))
    assert fields(replace(AWQ, rules=(others,)), "MixtralForCausalLM", EXPERTS) == []
