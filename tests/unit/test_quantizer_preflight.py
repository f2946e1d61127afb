"""What is told of a job from a checkpoint's configuration and headers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from bitmill_common.recipes import AdaptiveSearch, Algorithm, Calibration, ModuleRule, Recipe, Scheme, Treatment
from bitmill_common.stores import Stores
from bitmill_quantizer.plans import preflight, problems
from bitmill_quantizer.plans.estimates import least_adaptive_bytes
from bitmill_quantizer.plans.layers import linear_layers
from bitmill_quantizer.plans.problems import Problem
from bitmill_quantizer.plans.treatments import treat
from support.checkpoints import write_checkpoint


def checkpoint(tmp_path: Path, **options: object) -> Checkpoint:
    directory = write_checkpoint(tmp_path / "checkpoint", **options)
    return inspect_checkpoint(Stores([tmp_path.as_uri()]).open(directory.as_uri(), "uri"))


def reasons(found: object) -> list[tuple[str, str]]:
    return [(problem.field, problem.reason) for problem in found]


def test_a_good_checkpoint_has_no_problems(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    assert list(preflight.checkpoint_problems(found, linear_layers(found))) == []
    assert list(preflight.length_problems(found, Calibration(max_sequence_length=256))) == []


def test_an_unknown_architecture_and_a_quantized_checkpoint_are_both_named(tmp_path: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}
    found = checkpoint(tmp_path, config=config)
    assert reasons(preflight.checkpoint_problems(found, linear_layers(found))) == [
        ("", "UNSUPPORTED_ARCHITECTURE"),
        ("", "ALREADY_QUANTIZED"),
    ]


def test_every_size_of_the_configuration_must_be_one(tmp_path: Path) -> None:
    """The engine's libraries would fail on it, late and in words of their own."""
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts")
    found = checkpoint(tmp_path, config=dict.fromkeys(sizes, "8"))
    problems = list(preflight.checkpoint_problems(found, linear_layers(found)))
    assert [problem.reason for problem in problems] == ["CONFIG_INVALID"] * len(sizes)
    assert all(any(name in problem.description for problem in problems) for name in sizes)


@pytest.mark.parametrize(("count", "reason"), [(10_001, "CONFIG_INVALID"), (10_000, "LAYERS_MISSING")])
def test_an_absurd_number_of_decoder_layers_is_a_problem(tmp_path: Path, count: int, reason: str) -> None:
    """A model of so many would be made before the engine's libraries find that there are two."""
    found = checkpoint(tmp_path, config={"num_hidden_layers": count})
    [problem] = preflight.checkpoint_problems(found, linear_layers(found))
    assert problem.reason == reason
    assert len(problem.description) < 300


@pytest.mark.parametrize(
    ("num_layers", "patterns", "is_slow"),
    [
        (18_432, ["re:.*.*.*x"] * 6, False),
        (18_432, ["re:.*.*.*x"] * 64, True),
        (18_432, [r"re:.*\.experts\.(1|2|3)\..*_proj"] * 64, False),
        (18_432, ["lm_head", "re:lm_head", r"re:.*\*\*\*[*+{]"] * 20, False),
        (300, ["re:.*.*.*x"] * 64, False),
        (1, ["re:.*.*.*x"] * 64, False),
    ],
)
def test_patterns_that_would_hold_the_server_up_are_refused(
    num_layers: int, patterns: list[str], is_slow: bool
) -> None:
    """Each is quick for one name; a large mixture has tens of thousands."""
    layers = {f"model.layers.47.mlp.experts.{number}.gate_proj": (64, 64) for number in range(num_layers)}
    rule = Treatment(Scheme.W8A16, Algorithm.GPTQ, -1)
    recipes = {
        "spec.recipe.ignore": Recipe(Scheme.W4A16, 32, ignore=tuple(patterns)),
        "spec.recipe.rules": Recipe(Scheme.W4A16, 32, rules=tuple(ModuleRule(each, rule) for each in patterns)),
    }
    for field, recipe in recipes.items():
        assert reasons(preflight.pattern_problems(layers, recipe)) == [(field, "PATTERNS_TOO_SLOW")] * is_slow


@pytest.mark.parametrize("context_length", [8, 256, 2047])
def test_samples_longer_than_the_context_are_refused(tmp_path: Path, context_length: int) -> None:
    """Also where no sample is short enough."""
    found = preflight.length_problems(checkpoint(tmp_path, max_position_embeddings=context_length), Calibration())
    assert reasons(found) == [("spec.calibration.max_sequence_length", "EXCEEDS_CONTEXT_LENGTH")]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(-1, [("spec.recipe.adaptive.max_size_bytes", "BUDGET_TOO_SMALL")]), (0, [])],
)
def test_a_budget_below_the_least_possible_size_is_refused_with_that_size(
    tmp_path: Path, offset: int, expected: list[tuple[str, str]]
) -> None:
    """The smallest candidate for every layer, and all else as it is."""
    found = checkpoint(tmp_path)
    layers = linear_layers(found)
    candidates = (Treatment(Scheme.W8A16, Algorithm.GPTQ, -1), Treatment(Scheme.W4A16, Algorithm.GPTQ, 32))
    recipe = adaptive(candidates, 1)
    treated = treat(layers, recipe)
    assert recipe.adaptive is not None
    least = least_adaptive_bytes(found, layers, treated, recipe.adaptive)
    tight = adaptive(candidates, least + offset)
    problems = list(preflight.budget_problems(found, layers, treat(layers, tight), tight))
    assert reasons(problems) == expected
    assert all(str(least) in problem.description for problem in problems)


def test_a_budget_that_leaves_every_layer_as_it_is_is_refused(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    layers = linear_layers(found)
    small, plain = Treatment(Scheme.W4A16, Algorithm.GPTQ, 32), Treatment(Scheme.UNQUANTIZED, Algorithm.NONE, 0)
    roomy = adaptive((small, plain), found.size_bytes)
    assert reasons(preflight.budget_problems(found, layers, treat(layers, roomy), roomy)) == [
        ("spec.recipe.adaptive.max_size_bytes", "NOTHING_TO_QUANTIZE")
    ]
    without = adaptive((small, Treatment(Scheme.W8A16, Algorithm.GPTQ, -1)), found.size_bytes)
    assert list(preflight.budget_problems(found, layers, treat(layers, without), without)) == []


def adaptive(candidates: tuple[Treatment, ...], max_size_bytes: int) -> Recipe:
    search = AdaptiveSearch(candidates, max_size_bytes=max_size_bytes)
    return Recipe(Scheme.ADAPTIVE, 0, algorithm=Algorithm.NONE, adaptive=search)


def test_wrong_fields_are_raised_together_and_before_all_else() -> None:
    found = [
        Problem("", "ALREADY_QUANTIZED", "is quantized already"),
        Problem("spec.a", "X", "wrong", InvalidArgumentError),
        Problem("spec.b", "Y", "wrong too", InvalidArgumentError),
    ]
    with pytest.raises(InvalidArgumentError) as failure:
        problems.raise_for(found)
    assert [violation.field for violation in failure.value.violations] == ["spec.a", "spec.b"]


def test_what_is_no_field_is_raised_as_its_kind() -> None:
    found = [
        Problem("", "NO_SPACE", "no space", ResourceExhaustedError, {"free_bytes": "1"}),
        Problem("", "ALREADY_QUANTIZED", "is quantized already", FailedPreconditionError),
    ]
    with pytest.raises(ResourceExhaustedError, match="no space; is quantized already") as failure:
        problems.raise_for(found)
    assert (failure.value.reason, failure.value.metadata) == ("NO_SPACE", {"free_bytes": "1"})
    problems.raise_for([])
