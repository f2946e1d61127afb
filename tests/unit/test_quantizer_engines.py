"""What each engine does, as the server knows it before any job runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitmill_common.recipes import ActivationOrder, Algorithm, KvCacheScheme, ModuleRule, Recipe, Scheme, Treatment
from bitmill_quantizer.recipes.engines import ENGINES, recipe_violations

CLASSIC = ["gptqmodel", "auto_gptq"]
W4A16 = Recipe(Scheme.W4A16, 128)
AS_IT_IS = Treatment(Scheme.UNQUANTIZED, Algorithm.NONE, 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "recipe",
    [
        W4A16,
        Recipe(Scheme.W8A16, -1, activation_order=ActivationOrder.NONE),
        replace(W4A16, rules=(ModuleRule("re:.*down_proj", AS_IT_IS),)),
    ],
)
def test_every_engine_does_symmetric_gptq_with_layers_left_out(engine: str, recipe: Recipe) -> None:
    assert list(recipe_violations(engine, recipe)) == []


@pytest.mark.parametrize("engine", CLASSIC)
@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (replace(W4A16, scheme=Scheme.FP8_DYNAMIC, algorithm=Algorithm.RTN, group_size=0), "scheme"),
        (replace(W4A16, scheme=Scheme.UNQUANTIZED, algorithm=Algorithm.NONE, group_size=0), "scheme"),
        (replace(W4A16, algorithm=Algorithm.AWQ), "algorithm"),
        (replace(W4A16, algorithm=Algorithm.RTN), "algorithm"),
        (replace(W4A16, symmetric=False), "symmetric"),
        (replace(W4A16, kv_cache=KvCacheScheme.FP8), "kv_cache"),
        (
            replace(
                W4A16, rules=(ModuleRule("a", AS_IT_IS), ModuleRule("b", replace(AS_IT_IS, scheme=Scheme.MXFP4A16)))
            ),
            "rules[1].scheme",
        ),
    ],
)
def test_what_the_classic_layout_has_no_room_for_is_named_by_its_field(engine: str, recipe: Recipe, field: str) -> None:
    """llm-compressor takes each of them."""
    violations = list(recipe_violations(engine, recipe))
    assert [(each.field, each.reason) for each in violations] == [(f"spec.recipe.{field}", "UNSUPPORTED_BY_ENGINE")]
    assert list(recipe_violations("llmcompressor", recipe)) == []


def test_every_wrong_field_is_named_at_once() -> None:
    recipe = replace(W4A16, algorithm=Algorithm.AWQ, symmetric=False, kv_cache=KvCacheScheme.FP8)
    assert [each.field for each in recipe_violations("gptqmodel", recipe)] == [
        "spec.recipe.algorithm",
        "spec.recipe.symmetric",
        "spec.recipe.kv_cache",
    ]


def test_auto_gptq_treats_all_layers_alike() -> None:
    """It has one number of bits for a model; gptqmodel has one for each layer."""
    rule = ModuleRule("re:.*down_proj", Treatment(Scheme.W8A16, Algorithm.GPTQ, -1))
    recipe = replace(W4A16, rules=(rule,))
    assert [each.field for each in recipe_violations("auto_gptq", recipe)] == ["spec.recipe.rules[0].scheme"]
    assert list(recipe_violations("gptqmodel", recipe)) == []
