"""What is told of a job from a checkpoint's configuration and headers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_common.stores import Stores
from bitmill_quantizer import layers, preflight
from bitmill_quantizer.preflight import Problem
from bitmill_quantizer.schemes import devices_for
from support.checkpoints import write_checkpoint

W4A16 = Recipe(Scheme.W4A16, 32)
CALIBRATION = Calibration(num_samples=4, max_sequence_length=32)


def checkpoint(tmp_path: Path, **options: object) -> Checkpoint:
    directory = write_checkpoint(tmp_path / "checkpoint", **options)
    return inspect_checkpoint(Stores([tmp_path.as_uri()]).open(directory.as_uri(), "uri"))


def reasons(problems: object) -> list[tuple[str, str]]:
    return [(problem.field, problem.reason) for problem in problems]


def test_targets_are_the_linear_layers_without_embeddings_norms_and_head(tmp_path: Path) -> None:
    """Seven a layer; the output head is left out even where nothing ignores it."""
    found = checkpoint(tmp_path, tie_word_embeddings=False)
    assert len(layers.target_layers(found, [])) == 14
    assert layers.target_layers(found, ["lm_head"]) == layers.linear_layers(found)
    assert layers.linear_layers(found)["model.layers.1.mlp.down_proj"] == (64, 128)


def test_a_good_checkpoint_has_no_problems(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    assert list(preflight.checkpoint_problems(found)) == []
    assert list(preflight.recipe_problems(found, W4A16, CALIBRATION)) == []


def test_an_unknown_architecture_and_a_quantized_checkpoint_are_both_named(tmp_path: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}
    found = checkpoint(tmp_path, config=config)
    assert reasons(preflight.checkpoint_problems(found)) == [
        ("", "UNSUPPORTED_ARCHITECTURE"),
        ("", "ALREADY_QUANTIZED"),
    ]


def test_a_group_size_that_does_not_divide_names_those_that_do(tmp_path: Path) -> None:
    """576 is SmolLM2-135M's width: 32 and 64 divide it, 128 does not."""
    found = checkpoint(tmp_path, hidden_size=576, intermediate_size=1536, num_heads=9, num_key_value_heads=3)
    [problem] = preflight.recipe_problems(found, Recipe(Scheme.W4A16, 128), CALIBRATION)
    assert (problem.field, problem.reason) == ("spec.recipe.group_size", "GROUP_SIZE_DOES_NOT_DIVIDE")
    assert "576" in problem.description
    assert "divided by 32, 64;" in problem.description


def test_a_layer_left_out_need_not_be_divided(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, hidden_size=64, intermediate_size=80)
    recipe = Recipe(Scheme.W4A16, 32, ignore=("lm_head", r"re:.*down_proj"))
    assert list(preflight.recipe_problems(found, recipe, CALIBRATION)) == []


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        (("model.layers.7.mlp.up_proj",), [("spec.recipe.ignore[0]", "PATTERN_MATCHES_NOTHING")]),
        (("lm_head", "re:nothing"), [("spec.recipe.ignore[1]", "PATTERN_MATCHES_NOTHING")]),
        (("re:model",), [("spec.recipe.ignore", "NOTHING_TO_QUANTIZE")]),
        (("model.layers.0.self_attn.q_proj",), [("spec.recipe.ignore", "SPLITS_FUSED_LAYERS")]),
        ((r"re:.*gate_proj",), [("spec.recipe.ignore", "SPLITS_FUSED_LAYERS")]),
        ((r"re:.*\.layers\.0\.", r"re:.*o_proj"), []),
    ],
)
def test_patterns_must_match_and_leave_what_can_be_served(
    tmp_path: Path, ignore: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    """vLLM loads no checkpoint in which only a part of a fused matrix is quantized."""
    found = checkpoint(tmp_path)
    assert reasons(preflight.recipe_problems(found, Recipe(Scheme.W4A16, 32, ignore=ignore), CALIBRATION)) == expected


def test_samples_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    problems = preflight.recipe_problems(checkpoint(tmp_path), W4A16, Calibration())
    assert reasons(problems) == [("spec.calibration.max_sequence_length", "EXCEEDS_CONTEXT_LENGTH")]


@pytest.mark.parametrize(
    ("recipe", "bits_per_weight"),
    [
        (Recipe(Scheme.W4A16, 32), 4 + 16 / 32),
        (Recipe(Scheme.W4A16, 32, symmetric=False), 4 + 20 / 32),
        (Recipe(Scheme.W8A16, 64), 8 + 16 / 64),
    ],
)
def test_the_artifacts_size_is_that_of_packed_weights_and_scales(
    tmp_path: Path, recipe: Recipe, bits_per_weight: float
) -> None:
    found = checkpoint(tmp_path)
    estimate = preflight.estimate(found, recipe, CALIBRATION)
    count = estimate.num_quantized_parameters
    assert estimate.num_quantized_modules == 14
    expected = found.size_bytes - 2 * count + count * bits_per_weight / 8
    assert estimate.artifact_size_bytes == pytest.approx(expected, abs=14 * 16 + 1)


def test_wrong_fields_are_raised_together_and_before_all_else() -> None:
    problems = [
        Problem("", "ALREADY_QUANTIZED", "is quantized already"),
        Problem("spec.a", "X", "wrong", InvalidArgumentError),
        Problem("spec.b", "Y", "wrong too", InvalidArgumentError),
    ]
    with pytest.raises(InvalidArgumentError) as failure:
        preflight.raise_for(problems)
    assert [violation.field for violation in failure.value.violations] == ["spec.a", "spec.b"]


def test_what_is_no_field_is_raised_as_its_kind() -> None:
    problems = [
        Problem("", "NO_SPACE", "no space", ResourceExhaustedError, {"free_bytes": "1"}),
        Problem("", "ALREADY_QUANTIZED", "is quantized already", FailedPreconditionError),
    ]
    with pytest.raises(ResourceExhaustedError, match="no space; is quantized already") as failure:
        preflight.raise_for(problems)
    assert (failure.value.reason, failure.value.metadata) == ("NO_SPACE", {"free_bytes": "1"})
    preflight.raise_for([])


@pytest.mark.parametrize(
    ("scheme", "shape", "devices"),
    [
        (Scheme.W4A16, (64, 64), {Device.CPU, Device.CUDA}),
        (Scheme.W4A16, (48, 64), {Device.CUDA}),
        (Scheme.W8A16, (64, 64), {Device.CUDA}),
        (Scheme.W8A8_INT8, (48, 64), {Device.CPU, Device.CUDA}),
    ],
)
def test_devices_are_those_whose_kernels_take_every_layer(
    scheme: Scheme, shape: tuple[int, int], devices: set[Device]
) -> None:
    found = devices_for(Recipe(scheme, -1), [(64, 64), shape])
    assert {support.device for support in found} == devices
    assert DeviceSupport(Device.CUDA, 75) in found
