"""The rules of a specification that need no checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.recipes import (
    ActivationOrder,
    AdaptiveSearch,
    Algorithm,
    Calibration,
    KvCacheScheme,
    ModuleRule,
    Packing,
    Recipe,
    Scheme,
    Treatment,
)
from bitmill_quantizer.recipes.drafts import (
    AdaptiveDraft,
    CalibrationDraft,
    CandidateDraft,
    RecipeDraft,
    RuleDraft,
    SpecDraft,
)
from bitmill_quantizer.recipes.schemes import TRAITS
from bitmill_quantizer.recipes.specs import QuantizationSpec, complete

W4A16 = RecipeDraft(Scheme.W4A16)
DRAFT = SpecDraft("file:///models/tiny", "tiny", W4A16)
BUDGET = AdaptiveDraft(max_size_bytes=1000)


def with_recipe(**fields: object) -> SpecDraft:
    return replace(DRAFT, recipe=replace(W4A16, **fields))


def recipe_of(**fields: object) -> Recipe:
    spec, violations = complete(with_recipe(**fields))
    assert violations == []
    assert spec is not None
    return spec.recipe


def violations_of(**fields: object) -> list[tuple[str, str]]:
    """Of the recipe, paths without their common start."""
    spec, violations = complete(with_recipe(**fields))
    assert spec is None
    return [(violation.field.removeprefix("spec.recipe."), violation.reason) for violation in violations]


def test_every_default_is_filled_in() -> None:
    """What a job runs on says everything."""
    assert complete(DRAFT) == (
        QuantizationSpec(
            source_uri="file:///models/tiny",
            artifact_name="tiny",
            recipe=Recipe(Scheme.W4A16, 128, symmetric=True, ignore=("lm_head",), dampening_frac=0.01, seed=0),
            calibration=Calibration("", 512, 2048, Packing.CONCATENATE),
            evaluation_tokens=4096,
            engine="llmcompressor",
        ),
        [],
    )


@pytest.mark.parametrize(
    ("scheme", "group_size", "algorithm"),
    [
        (Scheme.W4A16, 128, Algorithm.GPTQ),
        (Scheme.W8A16, -1, Algorithm.GPTQ),
        (Scheme.W8A8_INT8, 0, Algorithm.GPTQ),
        (Scheme.FP8_DYNAMIC, 0, Algorithm.RTN),
        (Scheme.FP8_STATIC, 0, Algorithm.RTN),
        (Scheme.FP8_BLOCK, 0, Algorithm.RTN),
        (Scheme.NVFP4A16, 0, Algorithm.RTN),
        (Scheme.MXFP4A16, 0, Algorithm.RTN),
        (Scheme.UNQUANTIZED, 0, Algorithm.NONE),
    ],
)
def test_group_size_and_algorithm_default_to_the_schemes(scheme: Scheme, group_size: int, algorithm: Algorithm) -> None:
    """Nothing is asked for but the scheme."""
    recipe = recipe_of(scheme=scheme)
    assert recipe.treatment == Treatment(scheme, algorithm, group_size)
    assert recipe.smoothing_strength == (0.8 if scheme is Scheme.W8A8_INT8 else 0)


def test_a_search_defaults_to_four_candidates_and_eight_samples() -> None:
    """Or as many samples as the calibration has."""
    search = recipe_of(scheme=Scheme.ADAPTIVE, adaptive=BUDGET).adaptive
    assert search == AdaptiveSearch(
        candidates=(
            Treatment(Scheme.W4A16, Algorithm.GPTQ, 128),
            Treatment(Scheme.W4A16, Algorithm.GPTQ, 32),
            Treatment(Scheme.W8A16, Algorithm.GPTQ, -1),
            Treatment(Scheme.UNQUANTIZED, Algorithm.NONE, 0),
        ),
        max_size_bytes=1000,
        num_samples=8,
    )
    few = replace(
        DRAFT, recipe=RecipeDraft(Scheme.ADAPTIVE, adaptive=BUDGET), calibration=CalibrationDraft(num_samples=3)
    )
    spec, _ = complete(few)
    assert spec is not None
    assert spec.recipe.adaptive is not None
    assert spec.recipe.adaptive.num_samples == 3


@pytest.mark.parametrize(
    ("own", "rule", "expected"),
    [
        ({}, RuleDraft("x", Scheme.W8A16), Treatment(Scheme.W8A16, Algorithm.GPTQ, -1)),
        ({"algorithm": Algorithm.RTN}, RuleDraft("x", Scheme.W8A16), Treatment(Scheme.W8A16, Algorithm.RTN, -1)),
        ({"algorithm": Algorithm.AWQ}, RuleDraft("x", Scheme.W8A16), Treatment(Scheme.W8A16, Algorithm.GPTQ, -1)),
        ({"scheme": Scheme.FP8_DYNAMIC}, RuleDraft("x", Scheme.W4A16), Treatment(Scheme.W4A16, Algorithm.GPTQ, 128)),
        (
            {"algorithm": Algorithm.RTN},
            RuleDraft("x", Scheme.W4A16, 32, False, Algorithm.AWQ),
            Treatment(Scheme.W4A16, Algorithm.AWQ, 32, False),
        ),
    ],
)
def test_a_rule_rounds_as_the_recipe_says_where_its_scheme_takes_that(
    own: dict[str, object], rule: RuleDraft, expected: Treatment
) -> None:
    """An algorithm that the recipe only has by default is not handed on."""
    assert recipe_of(rules=(rule,), **own).rules == (ModuleRule("x", expected),)


def test_everything_that_is_given_is_taken() -> None:
    recipe = recipe_of(
        group_size=64,
        symmetric=False,
        ignore=("re:.*o_proj",),
        dampening_frac=0.1,
        seed=7,
        algorithm=Algorithm.AWQ,
        activation_order=ActivationOrder.NONE,
        kv_cache=KvCacheScheme.FP8,
    )
    assert recipe == Recipe(
        Scheme.W4A16,
        64,
        symmetric=False,
        ignore=("re:.*o_proj",),
        dampening_frac=0.1,
        seed=7,
        algorithm=Algorithm.AWQ,
        activation_order=ActivationOrder.NONE,
        kv_cache=KvCacheScheme.FP8,
    )


def test_every_violation_is_named_at_once() -> None:
    """A caller need not find them one by one."""
    draft = SpecDraft(
        recipe=RecipeDraft(
            scheme=99,
            dampening_frac=0.0,
            ignore=("re:[",),
            algorithm=9,
            activation_order=8,
            kv_cache=7,
            rules=(RuleDraft(), RuleDraft("re:(", Scheme.W8A16, 7)),
            adaptive=AdaptiveDraft(candidates=(CandidateDraft(),)),
        ),
        calibration=CalibrationDraft("file:///text.bin", num_samples=0, max_sequence_length=15, packing=5),
        evaluation_tokens=1_048_577,
        engine="none",
    )
    spec, violations = complete(draft)
    assert spec is None
    assert {(violation.field, violation.reason) for violation in violations} == {
        ("spec.source_uri", "REQUIRED"),
        ("spec.artifact_name", "REQUIRED"),
        ("spec.recipe.scheme", "UNKNOWN_SCHEME"),
        ("spec.recipe.dampening_frac", "OUT_OF_RANGE"),
        ("spec.recipe.ignore[0]", "INVALID_PATTERN"),
        ("spec.recipe.algorithm", "UNKNOWN_ALGORITHM"),
        ("spec.recipe.activation_order", "UNKNOWN_ACTIVATION_ORDER"),
        ("spec.recipe.kv_cache", "UNKNOWN_KV_CACHE"),
        ("spec.recipe.rules[0].pattern", "REQUIRED"),
        ("spec.recipe.rules[0].scheme", "REQUIRED"),
        ("spec.recipe.rules[1].pattern", "INVALID_PATTERN"),
        ("spec.recipe.rules[1].group_size", "UNSUPPORTED_GROUP_SIZE"),
        ("spec.recipe.adaptive", "REQUIRED"),
        ("spec.recipe.adaptive.candidates", "OUT_OF_RANGE"),
        ("spec.recipe.adaptive.candidates[0].scheme", "REQUIRED"),
        ("spec.calibration.uri", "UNSUPPORTED_CALIBRATION_FORMAT"),
        ("spec.calibration.num_samples", "OUT_OF_RANGE"),
        ("spec.calibration.max_sequence_length", "OUT_OF_RANGE"),
        ("spec.calibration.packing", "UNKNOWN_PACKING"),
        ("spec.evaluation.num_tokens", "OUT_OF_RANGE"),
        ("spec.engine", "UNKNOWN_ENGINE"),
    }


@pytest.mark.parametrize(
    ("fields", "violation"),
    [
        ({"scheme": None}, ("scheme", "REQUIRED")),
        ({"group_size": 0}, ("group_size", "UNSUPPORTED_GROUP_SIZE")),
        ({"group_size": 100}, ("group_size", "UNSUPPORTED_GROUP_SIZE")),
        ({"scheme": Scheme.W8A16, "symmetric": False}, ("symmetric", "UNSUPPORTED_SYMMETRY")),
        ({"scheme": Scheme.W8A16, "algorithm": Algorithm.AWQ}, ("algorithm", "UNSUPPORTED_ALGORITHM")),
        ({"scheme": Scheme.FP8_BLOCK, "algorithm": Algorithm.GPTQ}, ("algorithm", "UNSUPPORTED_ALGORITHM")),
        ({"scheme": Scheme.UNQUANTIZED, "algorithm": Algorithm.RTN}, ("algorithm", "UNSUPPORTED_ALGORITHM")),
        ({"activation_order": ActivationOrder.GROUP}, ("activation_order", "UNSUPPORTED_ACTIVATION_ORDER")),
        ({"dampening_frac": float("nan")}, ("dampening_frac", "OUT_OF_RANGE")),
        ({"dampening_frac": 1.5}, ("dampening_frac", "OUT_OF_RANGE")),
        ({"ignore": ("lm_head", "")}, ("ignore[1]", "INVALID_PATTERN")),
        ({"ignore": ("re:(a+)+b",)}, ("ignore[0]", "INVALID_PATTERN")),
        ({"ignore": ("re:.*.*.*.*x",)}, ("ignore[0]", "INVALID_PATTERN")),
        ({"ignore": ("x",) * 257}, ("ignore", "OUT_OF_RANGE")),
        ({"rules": (RuleDraft("x", Scheme.W8A16),) * 65}, ("rules", "OUT_OF_RANGE")),
        ({"rules": (RuleDraft("x", Scheme.ADAPTIVE),)}, ("rules[0].scheme", "UNSUPPORTED_SCHEME")),
        ({"rules": (RuleDraft("x", 77),)}, ("rules[0].scheme", "UNKNOWN_SCHEME")),
        ({"rules": (RuleDraft("re:(a+)+b", Scheme.W8A16),)}, ("rules[0].pattern", "INVALID_PATTERN")),
        ({"rules": (RuleDraft("x", Scheme.FP8_STATIC, 32),)}, ("rules[0].group_size", "UNSUPPORTED_GROUP_SIZE")),
        (
            {"rules": (RuleDraft("x", Scheme.W8A16, symmetric=False),)},
            ("rules[0].symmetric", "UNSUPPORTED_SYMMETRY"),
        ),
        (
            {"rules": (RuleDraft("x", Scheme.NVFP4A16, algorithm=Algorithm.AWQ),)},
            ("rules[0].algorithm", "UNSUPPORTED_ALGORITHM"),
        ),
        ({"smoothing_strength": 0.5}, ("smoothing_strength", "UNSUPPORTED_SMOOTHING")),
        ({"scheme": Scheme.W8A8_INT8, "smoothing_strength": 1.1}, ("smoothing_strength", "OUT_OF_RANGE")),
        ({"scheme": Scheme.W8A8_INT8, "smoothing_strength": float("nan")}, ("smoothing_strength", "OUT_OF_RANGE")),
        ({"scheme": Scheme.ADAPTIVE}, ("adaptive", "REQUIRED")),
        ({"adaptive": BUDGET}, ("adaptive", "UNSUPPORTED_SEARCH")),
        ({"scheme": Scheme.ADAPTIVE, "adaptive": AdaptiveDraft()}, ("adaptive", "REQUIRED")),
    ],
)
def test_a_value_that_the_recipe_does_not_take_is_a_violation_of_its_field(
    fields: dict[str, object], violation: tuple[str, str]
) -> None:
    assert violations_of(**fields) == [violation]


@pytest.mark.parametrize("scheme", [s for s in Scheme if s not in (Scheme.W4A16, Scheme.W8A16, Scheme.ADAPTIVE)])
def test_schemes_with_fixed_scales_take_no_group_size_and_no_zero_points(scheme: Scheme) -> None:
    assert violations_of(scheme=scheme, group_size=-1, symmetric=False) == [
        ("group_size", "UNSUPPORTED_GROUP_SIZE"),
        ("symmetric", "UNSUPPORTED_SYMMETRY"),
    ]


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"max_size_bytes": 0}, ("max_size_bytes", "OUT_OF_RANGE")),
        ({"max_size_bytes": None, "max_perplexity_ratio": 0.5}, ("max_perplexity_ratio", "OUT_OF_RANGE")),
        ({"max_size_bytes": None, "max_perplexity_ratio": float("inf")}, ("max_perplexity_ratio", "OUT_OF_RANGE")),
        ({"max_size_bytes": None, "max_perplexity_ratio": float("nan")}, ("max_perplexity_ratio", "OUT_OF_RANGE")),
        ({"num_samples": 0}, ("num_samples", "OUT_OF_RANGE")),
        ({"num_samples": 513}, ("num_samples", "OUT_OF_RANGE")),
        ({"candidates": (CandidateDraft(Scheme.W4A16),)}, ("candidates", "OUT_OF_RANGE")),
        (
            {"candidates": (CandidateDraft(Scheme.W4A16), CandidateDraft(Scheme.W4A16, 128))},
            ("candidates[1]", "DUPLICATE"),
        ),
        (
            {"candidates": (CandidateDraft(Scheme.W4A16), CandidateDraft(Scheme.ADAPTIVE))},
            ("candidates[1].scheme", "UNSUPPORTED_SCHEME"),
        ),
        (
            {"candidates": (CandidateDraft(Scheme.W4A16, 7), CandidateDraft(Scheme.UNQUANTIZED))},
            ("candidates[0].group_size", "UNSUPPORTED_GROUP_SIZE"),
        ),
    ],
)
def test_a_search_that_cannot_be_is_a_violation_of_its_field(
    changes: dict[str, object], violation: tuple[str, str]
) -> None:
    field, reason = violation
    assert violations_of(scheme=Scheme.ADAPTIVE, adaptive=replace(BUDGET, **changes)) == [(f"adaptive.{field}", reason)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"calibration": CalibrationDraft(num_samples=4097)}, "spec.calibration.num_samples"),
        ({"evaluation_tokens": 0}, "spec.evaluation.num_tokens"),
        ({"source_uri": "file:///" + "x" * 3000}, "spec.source_uri"),
    ],
)
def test_a_value_out_of_its_range_is_a_violation_of_its_field(change: dict[str, object], field: str) -> None:
    spec, violations = complete(replace(DRAFT, **change))
    assert spec is None
    assert [violation.field for violation in violations] == [field]


def test_the_table_of_schemes_is_whole() -> None:
    """Each has its row, and a default that it takes itself."""
    assert set(TRAITS) == set(Scheme)
    for traits in TRAITS.values():
        assert traits.default_group_size in (traits.group_sizes or (0,))


@pytest.mark.parametrize(
    "expression",
    [
        ".?" * 100 + "z",
        "(.|.)" * 40 + "z",
        "(?:.|.)" * 30 + "z",
        "(?#[)(.*)*(.*)*(?#])z",
        "(?x)#[\n(.*)*(.*)*#]\nz",
        "(?P<a>.|.)" * 20 + "z",
        "(.*)?" * 3 + ".?.?z",
        "a{99999999999}",
    ],
)
def test_an_expression_that_could_match_for_hours_or_cannot_be_compiled_is_refused(expression: str) -> None:
    """Python's matcher holds every thread of the server while it runs."""
    _, violations = complete(with_recipe(ignore=(f"re:{expression}",)))
    assert [(violation.field, violation.reason) for violation in violations] == [
        ("spec.recipe.ignore[0]", "INVALID_PATTERN")
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        "lm_head",
        r"re:.*\.layers\.(0|1)\..*",
        r"re:.*self_attn\.[qkv]_proj$",
        r"re:.*(self_attn|mlp)\.(gate|up)_proj",
        r"re:(?!.*mlp).*self_attn.*",
        r"re:(?i).*MLP\..*?_proj",
        r"re:.*layers\.1?\d\.",
        r"re:model[]*.[]layers[^]*+?{|(].*",
    ],
)
def test_common_patterns_are_taken(pattern: str) -> None:
    assert complete(with_recipe(ignore=(pattern,)))[1] == []


@given(st.from_regex(r"[a-z0-9]+([-_.][a-z0-9]+)*", fullmatch=True).filter(lambda name: len(name) <= 63))
def test_a_name_of_the_rule_is_taken(name: str) -> None:
    assert complete(replace(DRAFT, artifact_name=name))[1] == []


@pytest.mark.parametrize("name", ["A", "-a", "a-", "a--b", "a/b", "..", "a" * 64, "a b", "a\n", "é"])
def test_any_other_name_is_refused(name: str) -> None:
    """Nothing that could leave the artifact root, or differ from another by its case alone."""
    assert [violation.field for violation in complete(replace(DRAFT, artifact_name=name))[1]] == ["spec.artifact_name"]
