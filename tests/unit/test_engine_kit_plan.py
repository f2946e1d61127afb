"""The plan of an engine: what a recipe comes to for the layers of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bitmill_engine_kit.plan import AS_IT_IS, LayerPlan, fused_groups, is_fit, plan_layers
from bitmill_engine_kit.protocol import EngineError, ModuleRule, Recipe, Treatment
from bitmill_engine_llmcompressor.rows import Outcome, module_rows

W4A16 = Treatment("W4A16", "GPTQ", 64, True)
W8A8 = Treatment("W8A8_INT8", "GPTQ", 0, True)
FP8 = Treatment("FP8_DYNAMIC", "RTN", 0, True)
FP8_BLOCK = Treatment("FP8_BLOCK", "RTN", 0, True)
UNQUANTIZED = Treatment("UNQUANTIZED", "NONE", 0, True)


def recipe(treatment: Treatment = W4A16, **changes: Any) -> Recipe:
    plain = Recipe(
        treatment=treatment,
        ignore=("lm_head",),
        rules=(),
        activation_order="STATIC",
        kv_cache=None,
        smoothing_strength=0,
        dampening_frac=0.01,
        seed=0,
        adaptive=None,
    )
    return dataclasses.replace(plain, **changes)


def rules(*pairs: tuple[str, Treatment]) -> tuple[ModuleRule, ...]:
    return tuple(ModuleRule(pattern, treatment) for pattern, treatment in pairs)


def llama(hidden: int = 128, intermediate: int = 256, layers: int = 2) -> dict[str, tuple[int, int]]:
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in sizes.items()}


def error_of(shapes: dict[str, tuple[int, int]], wanted: Recipe) -> EngineError:
    with pytest.raises(EngineError) as caught:
        plan_layers(shapes, wanted)
    return caught.value


def test_every_layer_gets_the_recipes_treatment_in_the_models_order() -> None:
    """A head that the model does not have may be ignored all the same."""
    plan = plan_layers(llama(), recipe())
    assert list(plan) == list(llama())
    assert set(plan.values()) == {LayerPlan(W4A16)}


def test_ignore_goes_before_rules_and_the_first_rule_that_matches_counts() -> None:
    wanted = recipe(
        ignore=("re:.*layers.0.mlp.down_proj",),
        rules=rules(("re:.*down_proj", FP8), ("re:.*mlp.*", UNQUANTIZED)),
    )
    plan = {name: layer.treatment for name, layer in plan_layers(llama(), wanted).items()}
    assert plan["model.layers.0.mlp.down_proj"] == AS_IT_IS
    assert plan["model.layers.1.mlp.down_proj"] == FP8
    assert plan["model.layers.1.mlp.up_proj"] == AS_IT_IS
    assert plan["model.layers.1.self_attn.q_proj"] == W4A16


def test_the_attention_of_an_unquantized_model_can_be_fp8() -> None:
    wanted = recipe(UNQUANTIZED, rules=rules(("re:.*(q|k|v)_proj$", FP8)))
    treated = [name for name, layer in plan_layers(llama(), wanted).items() if layer.treatment != AS_IT_IS]
    assert len(treated) == 6
    assert all(name.endswith(("q_proj", "k_proj", "v_proj")) for name in treated)


@pytest.mark.parametrize(
    ("changes", "reason", "metadata"),
    [
        ({"ignore": ("re:(",)}, "IGNORE_INVALID", {"pattern": "re:("}),
        ({"ignore": ("model.layers.9.mlp",)}, "IGNORE_MATCHES_NOTHING", {"pattern": "model.layers.9.mlp"}),
        ({"rules": rules(("re:(", FP8))}, "RULE_INVALID", {"pattern": "re:("}),
        ({"rules": rules(("lm_head", FP8))}, "RULE_MATCHES_NOTHING", {"pattern": "lm_head"}),
        (
            {"rules": rules(("re:.*", FP8), ("re:.*down_proj", W8A8))},
            "RULE_MATCHES_NOTHING",
            {"pattern": "re:.*down_proj"},
        ),
        (
            {"ignore": ("re:.*down_proj",), "rules": rules(("re:.*down_proj", W8A8))},
            "RULE_MATCHES_NOTHING",
            {"pattern": "re:.*down_proj"},
        ),
        ({"ignore": ("re:.*",)}, "NOTHING_QUANTIZED", {}),
        ({"rules": rules(("re:.*", UNQUANTIZED))}, "NOTHING_QUANTIZED", {}),
        (
            {"ignore": ("re:.*k_proj",)},
            "SPLITS_FUSED_LAYERS",
            {"layer": "model.layers.0.self_attn.q_proj", "other": "model.layers.0.self_attn.k_proj"},
        ),
        (
            {"rules": rules(("re:.*gate_proj", FP8))},
            "SPLITS_FUSED_LAYERS",
            {"layer": "model.layers.0.mlp.gate_proj", "other": "model.layers.0.mlp.up_proj"},
        ),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_where(
    changes: dict[str, Any], reason: str, metadata: dict[str, str]
) -> None:
    error = error_of(llama(), recipe(**changes))
    assert error.reason == reason
    assert error.metadata == metadata


@pytest.mark.parametrize("pattern", ["lm_head", "re:.*lm_head", "re:lm_"])
def test_the_output_head_may_be_ignored_by_any_pattern(pattern: str) -> None:
    """It is left alone anyway, and a model that ties it has none."""
    assert plan_layers(llama(), recipe(ignore=(pattern,))) == plan_layers(llama(), recipe(ignore=()))


def test_a_model_that_is_left_as_it_is_is_no_error() -> None:
    assert set(plan_layers(llama(), recipe(UNQUANTIZED)).values()) == {LayerPlan(AS_IT_IS)}


def test_a_group_size_that_does_not_divide_is_an_error_that_names_those_that_do() -> None:
    error = error_of(llama(intermediate=192), recipe(Treatment("W4A16", "GPTQ", 128, True)))
    assert error.reason == "GROUP_SIZE_DOES_NOT_DIVIDE"
    assert error.metadata == {
        "group_size": "128",
        "in_features": "192",
        "layer": "model.layers.0.mlp.down_proj",
    }
    assert "32, 64 would do" in error.message


def test_a_layer_that_no_kernel_takes_stays_as_it_is_and_says_so() -> None:
    """It does not stand in the way of a group size that divides all others."""
    shapes = llama() | {"model.layers.1.mlp.down_proj": (128, 250)}
    plan = plan_layers(shapes, recipe())
    skipped = plan["model.layers.1.mlp.down_proj"]
    assert skipped.treatment == AS_IT_IS
    assert "250 input channels are no multiple of 32" in skipped.remark
    assert sum(layer.treatment == W4A16 for layer in plan.values()) == 13


def test_layers_that_run_as_one_matrix_are_left_alone_together() -> None:
    shapes = llama() | {"model.layers.0.self_attn.k_proj": (40, 128)}
    plan = plan_layers(shapes, recipe())
    remarks = {name: layer.remark for name, layer in plan.items() if layer.treatment == AS_IT_IS}
    assert [name.rpartition(".")[2] for name in remarks] == ["q_proj", "k_proj", "v_proj"]
    assert "40 output channels" in remarks["model.layers.0.self_attn.k_proj"]
    assert "runs as one matrix with model.layers.0.self_attn.k_proj" in remarks["model.layers.0.self_attn.q_proj"]


def test_a_model_of_which_no_layer_fits_is_an_error_that_says_why() -> None:
    error = error_of({"model.layers.0.mlp.down_proj": (128, 250)}, recipe())
    assert error.reason == "NOTHING_QUANTIZED"
    assert "250 input channels" in error.message


def test_block_fp8_needs_whole_blocks_where_a_matrix_is_followed_by_another() -> None:
    """Of fused layers only the last may end within a block; the input is always whole groups of 128."""
    shapes = llama(hidden=128, intermediate=256)
    plan = plan_layers(shapes | {"model.layers.0.self_attn.k_proj": (128, 128)}, recipe(FP8_BLOCK))
    assert plan["model.layers.0.self_attn.v_proj"].treatment == FP8_BLOCK
    assert plan["model.layers.1.self_attn.v_proj"].treatment == AS_IT_IS
    assert plan["model.layers.1.self_attn.o_proj"].treatment == FP8_BLOCK


def test_fused_groups_are_in_the_order_in_which_they_are_laid_together() -> None:
    names = [f"a.{leaf}" for leaf in ("k_proj", "q_proj", "up_proj", "v_proj", "o_proj", "gate_proj")]
    assert fused_groups(names) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("a.gate_proj", "a.up_proj"),
        ("a.o_proj",),
    ]


def test_all_experts_of_a_layer_are_one_group() -> None:
    names = [f"l.0.mlp.experts.{expert}.{leaf}" for expert in (0, 1) for leaf in ("gate_proj", "down_proj")]
    [group] = fused_groups(names)
    assert set(group) == set(names)
    shapes = dict.fromkeys(names, (64, 64)) | {names[0]: (40, 64)}
    assert error_of(shapes, recipe()).reason == "NOTHING_QUANTIZED"


@pytest.mark.parametrize(
    ("treatment", "shape", "fits"),
    [
        (W4A16, (64, 128), True),
        (W4A16, (64, 96), False),
        (W4A16, (48, 128), False),
        (W8A8, (48, 48), True),
        (FP8_BLOCK, (48, 128), True),
        (FP8_BLOCK, (128, 64), False),
        (UNQUANTIZED, (7, 7), True),
    ],
)
def test_whether_a_layer_fits_a_treatment(treatment: Treatment, shape: tuple[int, int], fits: bool) -> None:
    assert is_fit(treatment, shape) == fits


def test_each_layer_has_a_row_and_experts_share_one() -> None:
    plan = {
        "q_proj": LayerPlan(W4A16),
        "odd": LayerPlan(AS_IT_IS, "too odd"),
        "experts.0.up": LayerPlan(W4A16),
        "experts.1.up": LayerPlan(W4A16),
    }
    outcomes = {
        "q_proj": Outcome(2.0),
        "experts.0.up": Outcome(1.0, 0.1, "more damping"),
        "experts.1.up": Outcome(3.0),
    }
    rows = module_rows(plan, outcomes, lambda name: name.replace("0", "*").replace("1", "*"))
    assert rows == [
        {"name": "q_proj", "scheme": "W4A16", "group_size": 64, "loss": 2.0, "dampening_frac": None, "remark": ""},
        {
            "name": "odd",
            "scheme": "UNQUANTIZED",
            "group_size": 0,
            "loss": None,
            "dampening_frac": None,
            "remark": "too odd",
        },
        {
            "name": "experts.*.up",
            "scheme": "W4A16",
            "group_size": 64,
            "loss": 2.0,
            "dampening_frac": 0.1,
            "remark": "1 of 2: more damping",
        },
    ]
