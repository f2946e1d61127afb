"""The rules of a specification that need no checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_quantizer.specs import QuantizationSpec, SpecDraft, complete

DRAFT = SpecDraft(source_uri="file:///models/tiny", artifact_name="tiny", scheme=Scheme.W4A16)


def test_every_default_is_filled_in() -> None:
    """What a job runs on says everything."""
    assert complete(DRAFT) == (
        QuantizationSpec(
            source_uri="file:///models/tiny",
            artifact_name="tiny",
            recipe=Recipe(Scheme.W4A16, 128, symmetric=True, ignore=("lm_head",), dampening_frac=0.01, seed=0),
            calibration=Calibration("", 512, 2048),
            evaluation_tokens=4096,
        ),
        [],
    )


@pytest.mark.parametrize(("scheme", "group_size"), [(Scheme.W4A16, 128), (Scheme.W8A16, -1), (Scheme.W8A8_INT8, -1)])
def test_the_default_group_size_is_the_schemes(scheme: Scheme, group_size: int) -> None:
    spec, _ = complete(replace(DRAFT, scheme=scheme))
    assert spec is not None
    assert spec.recipe.group_size == group_size


def test_every_violation_is_named_at_once() -> None:
    """A caller need not find them one by one."""
    draft = SpecDraft(
        unknown_scheme=9,
        dampening_frac=0.0,
        ignore=("re:[",),
        calibration_uri="file:///text.bin",
        num_samples=0,
        max_sequence_length=15,
        evaluation_tokens=1_048_577,
    )
    spec, violations = complete(draft)
    assert spec is None
    assert {(violation.field, violation.reason) for violation in violations} == {
        ("spec.source_uri", "REQUIRED"),
        ("spec.artifact_name", "REQUIRED"),
        ("spec.recipe.scheme", "UNKNOWN_SCHEME"),
        ("spec.recipe.dampening_frac", "OUT_OF_RANGE"),
        ("spec.recipe.ignore[0]", "INVALID_PATTERN"),
        ("spec.calibration.uri", "UNSUPPORTED_CALIBRATION_FORMAT"),
        ("spec.calibration.num_samples", "OUT_OF_RANGE"),
        ("spec.calibration.max_sequence_length", "OUT_OF_RANGE"),
        ("spec.evaluation.num_tokens", "OUT_OF_RANGE"),
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scheme": None}, "spec.recipe.scheme"),
        ({"group_size": 0}, "spec.recipe.group_size"),
        ({"group_size": 100}, "spec.recipe.group_size"),
        ({"scheme": Scheme.W8A8_INT8, "group_size": -1}, "spec.recipe.group_size"),
        ({"scheme": Scheme.W8A16, "symmetric": False}, "spec.recipe.symmetric"),
        ({"dampening_frac": float("nan")}, "spec.recipe.dampening_frac"),
        ({"dampening_frac": 1.5}, "spec.recipe.dampening_frac"),
        ({"num_samples": 4097}, "spec.calibration.num_samples"),
        ({"evaluation_tokens": 0}, "spec.evaluation.num_tokens"),
        ({"source_uri": "file:///" + "x" * 3000}, "spec.source_uri"),
        ({"ignore": ("lm_head", "")}, "spec.recipe.ignore[1]"),
        ({"ignore": ("re:(a+)+b",)}, "spec.recipe.ignore[0]"),
        ({"ignore": ("re:.*.*.*.*x",)}, "spec.recipe.ignore[0]"),
    ],
)
def test_a_value_out_of_its_range_is_a_violation_of_its_field(change: dict[str, object], field: str) -> None:
    spec, violations = complete(replace(DRAFT, **change))
    assert spec is None
    assert [violation.field for violation in violations] == [field]


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
    _, violations = complete(replace(DRAFT, ignore=(f"re:{expression}",)))
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
    assert complete(replace(DRAFT, ignore=(pattern,)))[1] == []


@given(st.from_regex(r"[a-z0-9]+([-_.][a-z0-9]+)*", fullmatch=True).filter(lambda name: len(name) <= 63))
def test_a_name_of_the_rule_is_taken(name: str) -> None:
    assert complete(replace(DRAFT, artifact_name=name))[1] == []


@pytest.mark.parametrize("name", ["A", "-a", "a-", "a--b", "a/b", "..", "a" * 64, "a b", "a\n", "é"])
def test_any_other_name_is_refused(name: str) -> None:
    """Nothing that could leave the artifact root, or differ from another by its case alone."""
    assert [violation.field for violation in complete(replace(DRAFT, artifact_name=name))[1]] == ["spec.artifact_name"]
