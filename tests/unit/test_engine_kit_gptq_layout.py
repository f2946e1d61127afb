"""What of a recipe the classic GPTQ layout has room for, and how it is written down."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bitmill_engine_kit.gptq_layout import dtype_of, dynamic_rules, require_supported, write_config
from bitmill_engine_kit.plan import AS_IT_IS, LayerPlan
from bitmill_engine_kit.protocol import EngineError, ModuleRule, Recipe, Treatment

W4 = Treatment("W4A16", "GPTQ", 32, True)
W8 = Treatment("W8A16", "GPTQ", -1, True)
RECIPE = Recipe(W4, ("lm_head",), (), "STATIC", None, 0.0, 0.01, 0, None)
ATTENTION = tuple(f"model.layers.1.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"))
MLP = tuple(f"model.layers.1.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        replace(RECIPE, treatment=W8),
        replace(RECIPE, rules=(ModuleRule("x", AS_IT_IS),), activation_order="NONE"),
    ],
)
def test_symmetric_gptq_of_four_and_eight_bits_is_taken(recipe: Recipe) -> None:
    for one_treatment in (True, False):
        require_supported(recipe, "engine", one_treatment=one_treatment)


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (replace(RECIPE, treatment=Treatment("FP8_DYNAMIC", "RTN", 0, True)), "scheme"),
        (replace(RECIPE, treatment=AS_IT_IS), "scheme"),
        (replace(RECIPE, treatment=replace(W4, algorithm="AWQ")), "algorithm"),
        (replace(RECIPE, treatment=replace(W4, symmetric=False)), "symmetric"),
        (replace(RECIPE, rules=(ModuleRule("x", replace(W8, symmetric=False)),)), "symmetric"),
        (replace(RECIPE, activation_order="GROUP"), "activation_order"),
        (replace(RECIPE, kv_cache="FP8"), "kv_cache"),
    ],
)
def test_anything_else_is_refused_by_its_field(recipe: Recipe, field: str) -> None:
    with pytest.raises(EngineError) as refusal:
        require_supported(recipe, "engine", one_treatment=False)
    assert refusal.value.reason == "UNSUPPORTED_RECIPE"
    assert refusal.value.metadata == {"field": field}


def test_an_engine_with_one_treatment_refuses_a_second() -> None:
    recipe = replace(RECIPE, rules=(ModuleRule("x", W8),))
    require_supported(recipe, "engine", one_treatment=False)
    with pytest.raises(EngineError) as refusal:
        require_supported(recipe, "engine", one_treatment=True)
    assert refusal.value.metadata == {"field": "rules"}


def test_layers_that_differ_are_found_by_their_names_and_by_those_that_vllm_has_for_them() -> None:
    """vLLM looks for the matrix that it runs several layers as."""
    treatments = dict.fromkeys(ATTENTION[:3], AS_IT_IS) | {ATTENTION[3]: W4} | dict.fromkeys(MLP, W8)
    rules = dynamic_rules({name: LayerPlan(treatment) for name, treatment in treatments.items()}, RECIPE)
    assert list(rules.values()) == [{}, {"bits": 8, "group_size": -1}, {"bits": 8, "group_size": -1}]
    signs, patterns = zip(*((rule[:2], rule[2:]) for rule in rules), strict=True)
    assert signs == ("-:", "+:", "+:")
    for pattern, names in zip(patterns, (ATTENTION[:3], MLP[:2], MLP[2:]), strict=True):
        assert [name for name in (*ATTENTION, *MLP) if re.match(pattern, name)] == list(names)
    assert re.match(patterns[0], "model.layers.1.self_attn.qkv_proj")
    assert re.match(patterns[1], "model.layers.1.mlp.gate_up_proj")
    assert not any(re.match(pattern, "model.layers.11.self_attn.qkv_proj") for pattern in patterns)


def test_a_recipe_for_all_layers_needs_no_rules() -> None:
    assert dynamic_rules({name: LayerPlan(W4) for name in ATTENTION}, RECIPE) == {}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_weights_have_sixteen_bits_whatever_the_source_has(tmp_path: Path, config: dict[str, str], dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(tmp_path) == dtype


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_is_the_sources_own_and_says_how_it_is_quantized(tmp_path: Path, key: str) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    model.mkdir()
    config = {"model_type": "llama", "rope_theta": 1e5, key: "float32"}
    (source / "config.json").write_text(json.dumps(config))
    write_config(source, model, {"bits": 4}, "bfloat16")
    written = json.loads((model / "config.json").read_text())
    assert written == config | {key: "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4}}


@pytest.mark.parametrize(("damping", "written"), [(0.99, True), (1.0, False)])
def test_a_damping_that_readers_refuse_is_not_written(tmp_path: Path, damping: float, written: bool) -> None:
    """GPTQModel and AutoGPTQ round with a damping of 1, and then load no model that names it."""
    (tmp_path / "config.json").write_text("{}")
    write_config(tmp_path, tmp_path, {"bits": 4, "damp_percent": damping}, "bfloat16")
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert ("damp_percent" in quantization, quantization["bits"]) == (written, 4)
