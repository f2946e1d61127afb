"""Sizes and devices from a checkpoint's headers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
from bitmill_common.recipes import Algorithm, Calibration, KvCacheScheme, Recipe, Scheme
from bitmill_common.stores import Stores
from bitmill_quantizer.plans import estimates
from bitmill_quantizer.plans.layers import linear_layers
from bitmill_quantizer.plans.treatments import treat
from bitmill_quantizer.recipes.schemes import default_treatment, devices_for
from support.checkpoints import write_checkpoint

CALIBRATION = Calibration(num_samples=4, max_sequence_length=32)


def checkpoint(tmp_path: Path, **options: object) -> Checkpoint:
    directory = write_checkpoint(tmp_path / "checkpoint", **options)
    return inspect_checkpoint(Stores([tmp_path.as_uri()]).open(directory.as_uri(), "uri"))


def estimate(found: Checkpoint, recipe: Recipe) -> estimates.Estimate:
    layers = linear_layers(found)
    return estimates.estimate(found, layers, treat(layers, recipe), recipe, CALIBRATION)


def plain(scheme: Scheme) -> Recipe:
    own = default_treatment(scheme)
    return Recipe(scheme, own.group_size, algorithm=own.algorithm)


@pytest.mark.parametrize(
    ("recipe", "bits_per_weight"),
    [
        (Recipe(Scheme.W4A16, 32), 4 + 16 / 32),
        (Recipe(Scheme.W4A16, 32, symmetric=False), 4 + 20 / 32),
        (Recipe(Scheme.W8A16, 64), 8 + 16 / 64),
        (plain(Scheme.NVFP4A16), 4 + 8 / 16),
        (plain(Scheme.MXFP4A16), 4 + 8 / 32),
    ],
)
def test_the_artifacts_size_is_that_of_packed_weights_and_scales(
    tmp_path: Path, recipe: Recipe, bits_per_weight: float
) -> None:
    found = checkpoint(tmp_path)
    expected = estimate(found, recipe)
    count = expected.num_quantized_parameters
    assert expected.num_quantized_modules == 14
    weights = 2 * found.num_parameters - 2 * count + count * bits_per_weight / 8
    others = sum(file.size_bytes for file in found.files if file.path != "model.safetensors")
    assert expected.artifact_size_bytes == pytest.approx(weights + others, abs=14 * 16 + 1)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_what_is_not_quantized_is_stored_in_16_bits(tmp_path: Path, dtype: str) -> None:
    found = checkpoint(tmp_path, dtype=dtype)
    expected = estimate(found, plain(Scheme.UNQUANTIZED))
    others = sum(file.size_bytes for file in found.files if file.path != "model.safetensors")
    assert expected.artifact_size_bytes == 2 * found.num_parameters + others
    assert expected.num_quantized_modules == 0


def test_every_scheme_but_adaptive_is_sized_with_its_defaults(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, hidden_size=256, intermediate_size=512)
    layers = linear_layers(found)
    sizes = {size.scheme: size for size in estimates.scheme_sizes(found, layers)}
    assert set(sizes) == set(Scheme) - {Scheme.ADAPTIVE}
    for scheme, size in sizes.items():
        assert size.artifact_size_bytes == estimate(found, plain(scheme)).artifact_size_bytes
        assert size.devices == devices_for([scheme])
    assert sizes[Scheme.W4A16].artifact_size_bytes < sizes[Scheme.FP8_STATIC].artifact_size_bytes
    assert sizes[Scheme.FP8_STATIC].artifact_size_bytes < sizes[Scheme.UNQUANTIZED].artifact_size_bytes


@pytest.mark.parametrize(
    ("schemes", "on_cpu", "capability"),
    [
        ([Scheme.W4A16], True, 75),
        ([Scheme.W8A16], False, 75),
        ([Scheme.W8A8_INT8], True, 75),
        ([Scheme.FP8_DYNAMIC], True, 75),
        ([Scheme.FP8_STATIC], False, 75),
        ([Scheme.FP8_BLOCK], False, 75),
        ([Scheme.NVFP4A16], False, 75),
        ([Scheme.MXFP4A16], False, 80),
        ([Scheme.UNQUANTIZED], True, 75),
        ([Scheme.W4A16, Scheme.FP8_DYNAMIC, Scheme.UNQUANTIZED], True, 75),
        ([Scheme.W4A16, Scheme.MXFP4A16], False, 80),
    ],
)
def test_devices_are_those_that_serve_every_scheme(schemes: list[Scheme], on_cpu: bool, capability: int) -> None:
    expected = [DeviceSupport(Device.CUDA, capability)]
    assert list(devices_for(schemes)) == ([DeviceSupport(Device.CPU), *expected] if on_cpu else expected)


@pytest.mark.parametrize(("head_size", "on_cpu"), [(64, True), (48, False), (None, False)])
def test_an_fp8_cache_needs_ampere_or_heads_that_the_cpu_takes(head_size: int | None, on_cpu: bool) -> None:
    found = devices_for([Scheme.UNQUANTIZED], KvCacheScheme.FP8, head_size)
    assert (DeviceSupport(Device.CPU) in found) is on_cpu
    assert found[-1] == DeviceSupport(Device.CUDA, 80)


def test_the_width_of_a_head_is_the_configs_or_follows_from_it(tmp_path: Path) -> None:
    assert estimates.head_size(checkpoint(tmp_path / "a", config={"head_dim": 24})) == 24
    assert estimates.head_size(checkpoint(tmp_path / "b", config={"head_dim": None})) == 16


def test_data_is_kept_in_memory_only_where_it_is_read(tmp_path: Path) -> None:
    """A recipe that rounds to nearest holds no activations and no Hessians."""
    found = checkpoint(tmp_path)
    rounded = Recipe(Scheme.W4A16, 32, algorithm=Algorithm.RTN)
    layers = linear_layers(found)
    much = Calibration(num_samples=4096, max_sequence_length=2048)
    calibrated, nearest = (
        estimates.estimate(found, layers, treat(layers, recipe), recipe, much).host_memory_bytes
        for recipe in (Recipe(Scheme.W4A16, 32), rounded)
    )
    assert calibrated > nearest + 4096 * 2048 * 64


def test_quantized_experts_are_not_for_every_processor() -> None:
    """Their kernels need AMX; a mixture whose experts stay as they are is served anywhere."""
    assert devices_for([Scheme.W4A16], quantized_experts=True) == (DeviceSupport(Device.CUDA, 75),)
    assert DeviceSupport(Device.CPU) in devices_for([Scheme.W4A16], quantized_experts=False)
