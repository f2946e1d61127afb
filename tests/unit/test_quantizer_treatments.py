"""What a recipe does to each layer, and what in it does not fit the model."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.recipes import AdaptiveSearch, Algorithm, ModuleRule, Recipe, Scheme, Treatment
from bitmill_engine_kit import plan as engine_plan
from bitmill_engine_kit import protocol
from bitmill_engine_kit.protocol import EngineError
from bitmill_quantizer.plans.layer_sizes import kind_bytes, treated_bytes
from bitmill_quantizer.plans.treatments import AS_IT_IS, LayerTreatments, group_kinds, treat
from bitmill_quantizer.recipes.schemes import TRAITS, default_treatment

W4A16 = Recipe(Scheme.W4A16, 32)
W8A16 = Treatment(Scheme.W8A16, Algorithm.GPTQ, -1)
FP8 = Treatment(Scheme.FP8_DYNAMIC, Algorithm.RTN, 0)
QKV = r"re:.*self_attn\.(q|k|v)_proj"


def llama(
    hidden: int = 64, intermediate: int = 128, key_value: int = 32, layers: int = 2
) -> dict[str, tuple[int, int]]:
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }.items()
    }


def unquantized(*rules: tuple[str, Treatment]) -> Recipe:
    return Recipe(
        Scheme.UNQUANTIZED,
        0,
        algorithm=Algorithm.NONE,
        rules=tuple(ModuleRule(pattern, treatment) for pattern, treatment in rules),
    )


def w4a16(*rules: tuple[str, Treatment], ignore: tuple[str, ...] = ("lm_head",), group_size: int = 32) -> Recipe:
    return Recipe(
        Scheme.W4A16,
        group_size,
        ignore=ignore,
        rules=tuple(ModuleRule(pattern, treatment) for pattern, treatment in rules),
    )


def reasons(treated: LayerTreatments) -> list[tuple[str, str]]:
    return [(problem.field.removeprefix("spec.recipe."), problem.reason) for problem in treated.problems]


def test_ignore_goes_before_rules_and_the_first_rule_that_matches_counts() -> None:
    recipe = w4a16(("re:.*down_proj", W8A16), ("re:.*mlp", FP8), ignore=(r"re:.*layers\.0\.mlp",))
    treated = treat(llama(), recipe)
    assert treated.problems == ()
    assert treated.treatments["model.layers.0.mlp.down_proj"] == AS_IT_IS
    assert treated.treatments["model.layers.1.mlp.down_proj"] == W8A16
    assert treated.treatments["model.layers.1.mlp.up_proj"] == FP8
    assert treated.treatments["model.layers.1.self_attn.o_proj"] == recipe.treatment
    assert len(treated.quantized) == 11


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (w4a16(ignore=("model.layers.7.mlp.up_proj",)), [("ignore[0]", "PATTERN_MATCHES_NOTHING")]),
        (w4a16(ignore=("lm_head", "re:nothing")), [("ignore[1]", "PATTERN_MATCHES_NOTHING")]),
        (w4a16(ignore=("re:model",)), [("ignore", "NOTHING_TO_QUANTIZE")]),
        (w4a16(ignore=("model.layers.0.self_attn.q_proj",)), [("ignore", "SPLITS_FUSED_LAYERS")]),
        (w4a16(ignore=(r"re:.*gate_proj",)), [("ignore", "SPLITS_FUSED_LAYERS")]),
        (w4a16(ignore=(r"re:.*\.layers\.0\.", r"re:.*o_proj")), []),
        (w4a16(("lm_head", W8A16)), [("rules[0].pattern", "PATTERN_MATCHES_NOTHING")]),
        (w4a16(("re:.*mlp", FP8), ("re:.*up_proj", W8A16)), [("rules[1].pattern", "PATTERN_MATCHES_NOTHING")]),
        (
            w4a16(("re:.*o_proj", FP8), ignore=("re:.*o_proj",)),
            [("rules[0].pattern", "PATTERN_MATCHES_NOTHING")],
        ),
        (w4a16(("re:.*q_proj", FP8)), [("rules[0].pattern", "SPLITS_FUSED_LAYERS")]),
        (w4a16(("re:.*up_proj", FP8), ("re:.*gate_proj", FP8)), []),
        (w4a16((QKV, AS_IT_IS)), []),
        (w4a16(("re:model", AS_IT_IS)), [("rules", "NOTHING_TO_QUANTIZE")]),
        (unquantized(), []),
        (unquantized((QKV, FP8)), []),
        (unquantized((QKV, AS_IT_IS)), [("rules", "NOTHING_TO_QUANTIZE")]),
    ],
)
def test_patterns_must_match_and_leave_what_can_be_served(recipe: Recipe, expected: list[tuple[str, str]]) -> None:
    """vLLM loads no checkpoint in which the parts of a fused matrix differ."""
    assert reasons(treat(llama(), recipe)) == expected


def test_a_group_size_that_does_not_divide_names_those_that_do() -> None:
    """576 is SmolLM2-135M's width: 32 and 64 divide it, 128 does not."""
    layers = llama(576, 1536, 192)
    [problem] = treat(layers, w4a16(group_size=128)).problems
    assert (problem.field, problem.reason) == ("spec.recipe.group_size", "GROUP_SIZE_DOES_NOT_DIVIDE")
    assert "576" in problem.description
    assert "divided by 32, 64;" in problem.description
    rule = Treatment(Scheme.W4A16, Algorithm.GPTQ, 128)
    assert reasons(treat(layers, unquantized(("re:.*o_proj", rule)))) == [
        ("rules[0].group_size", "GROUP_SIZE_DOES_NOT_DIVIDE")
    ]
    assert reasons(treat(layers, unquantized(("re:.*down_proj", rule)))) == []


def test_the_group_size_of_each_candidate_must_divide() -> None:
    search = AdaptiveSearch((rule := Treatment(Scheme.W4A16, Algorithm.GPTQ, 128), AS_IT_IS), max_size_bytes=1)
    recipe = Recipe(Scheme.ADAPTIVE, 0, algorithm=Algorithm.NONE, adaptive=search)
    assert reasons(treat(llama(576, 1536, 192), recipe)) == [
        ("adaptive.candidates[0].group_size", "GROUP_SIZE_DOES_NOT_DIVIDE")
    ]
    assert rule.group_size == 128


def test_what_no_kernel_takes_is_skipped_with_all_that_runs_as_one_matrix_with_it() -> None:
    """24 output channels of k and v are too few; q goes with them."""
    treated = treat(llama(key_value=24), W4A16)
    assert treated.problems == ()
    assert {name.rpartition(".")[2] for name in treated.skipped} == {"q_proj", "k_proj", "v_proj"}
    assert all(treated.treatments[name] == AS_IT_IS for name in treated.skipped)


def test_a_model_that_no_kernel_takes_has_nothing_to_quantize() -> None:
    assert reasons(treat(llama(40, 88, 40), W4A16)) == [("scheme", "NOTHING_TO_QUANTIZE")]


def test_all_experts_of_a_layer_get_one_treatment() -> None:
    layers = {
        f"model.layers.0.mlp.experts.{expert}.{leaf}": (64, 64)
        for expert in range(4)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    assert reasons(treat(layers, w4a16((r"re:.*experts\.0\.", FP8)))) == [("rules[0].pattern", "SPLITS_FUSED_LAYERS")]
    assert reasons(treat(layers, w4a16(("re:.*experts", FP8)))) == []


sizes = st.sampled_from([16, 24, 32, 48, 64, 96, 128, 160, 256, 384])
patterns = st.sampled_from(
    [
        "lm_head",
        "re:.*lm_head",
        QKV,
        "re:.*mlp",
        "re:.*down_proj",
        "re:.*q_proj",
        r"re:.*layers\.0\.",
        "re:model",
        "re:none",
    ]
)
concrete = st.sampled_from([scheme for scheme in Scheme if scheme is not Scheme.ADAPTIVE])


@st.composite
def treatments(draw: st.DrawFn) -> Treatment:
    scheme = draw(concrete)
    traits = TRAITS[scheme]
    group_size = draw(st.sampled_from(traits.group_sizes or (traits.default_group_size,)))
    return Treatment(scheme, draw(st.sampled_from(traits.algorithms)), group_size)


@given(
    st.builds(llama, sizes, sizes, sizes),
    treatments(),
    st.lists(patterns, max_size=2),
    st.lists(st.tuples(patterns, treatments()), max_size=3),
)
def test_the_engine_plans_the_same(
    layers: Mapping[str, tuple[int, int]],
    own: Treatment,
    ignore: list[str],
    rules: list[tuple[str, Treatment]],
) -> None:
    """What Plan accepts the engine does, layer for layer; what it refuses the engine refuses."""
    recipe = Recipe(
        own.scheme,
        own.group_size,
        algorithm=own.algorithm,
        ignore=tuple(ignore),
        rules=tuple(ModuleRule(pattern, treatment) for pattern, treatment in rules),
    )
    treated = treat(layers, recipe)
    asked = protocol.Recipe(
        treatment=in_words(own),
        ignore=recipe.ignore,
        rules=tuple(protocol.ModuleRule(rule.pattern, in_words(rule.treatment)) for rule in recipe.rules),
        activation_order="STATIC",
        kv_cache=None,
        smoothing_strength=0,
        dampening_frac=0.01,
        seed=0,
        adaptive=None,
    )
    try:
        planned = engine_plan.plan_layers(layers, asked)
    except EngineError:
        assert treated.problems
        return
    # Rules that leave everything as it is are a mistake to the server, and a pass-through to the engine.
    assert {problem.reason for problem in treated.problems} <= {"NOTHING_TO_QUANTIZE"}
    assert {name: in_words(each) for name, each in treated.treatments.items()} == {
        name: layer.treatment for name, layer in planned.items()
    }
    assert set(treated.skipped) == {name for name, layer in planned.items() if layer.remark}


def in_words(treatment: Treatment) -> protocol.Treatment:
    return protocol.Treatment(
        treatment.scheme.value, treatment.algorithm.value, treatment.group_size, treatment.symmetric
    )


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.ADAPTIVE])
def test_the_kinds_of_groups_get_what_their_layers_get(scheme: Scheme) -> None:
    """Sizes are counted by kind, since a mixture has tens of thousands of layers."""
    generator = random.Random(0)
    own = default_treatment(scheme)
    recipe = Recipe(scheme, own.group_size, algorithm=own.algorithm)
    for _ in range(20):
        layers = llama(*(generator.randrange(16, 400, 16) for _ in range(3)))
        treated = treat(layers, recipe).treatments
        by_kind = sum(count * kind_bytes(kind, own) for kind, count in group_kinds(layers).items())
        assert by_kind == treated_bytes(layers, treated)
