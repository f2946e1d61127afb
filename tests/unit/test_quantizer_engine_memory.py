"""The estimated memory is above what the llmcompressor engine was measured to hold, and not by more than a third."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
from bitmill_common.recipes import Algorithm, Calibration, Recipe, Scheme
from bitmill_common.stores import Stores
from bitmill_quantizer.plans import estimates
from bitmill_quantizer.plans.layers import linear_layers
from bitmill_quantizer.plans.treatments import treat
from support.checkpoints import write_checkpoint

# The shapes of SmolLM2-135M, of a Llama of 0.49 billion parameters, and of Llama 3 8B.
MODELS = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_key_value_heads": 3},
    "490M": {"hidden_size": 1536, "intermediate_size": 4096, "num_layers": 16, "num_heads": 16},
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
GPTQ = Recipe(Scheme.W4A16, 64)
RTN = Recipe(Scheme.W4A16, 64, algorithm=Algorithm.RTN)
FP8 = Recipe(Scheme.FP8_DYNAMIC, 0, algorithm=Algorithm.RTN)
STATIC = Recipe(Scheme.FP8_STATIC, 0, algorithm=Algorithm.RTN)


def estimate(tmp_path: Path, model: str, recipe: Recipe, calibration: Calibration, gpu: int = 0) -> estimates.Estimate:
    fields = {"num_key_value_heads": 8, "vocab_size": 49152, "max_position_embeddings": 8192} | MODELS[model]
    directory = write_checkpoint(tmp_path / model, seed=None, **fields)
    found: Checkpoint = inspect_checkpoint(Stores([tmp_path.as_uri()]).open(directory.as_uri(), "uri"))
    layers = linear_layers(found)
    return estimates.estimate(found, layers, treat(layers, recipe), recipe, calibration, gpu)


@pytest.mark.parametrize(
    ("model", "recipe", "num_samples", "length", "peaks_gb"),
    [
        # What `quantize` held, and `evaluate` where it ran with that recipe.
        ("135M", GPTQ, 16, 256, [1.150, 1.246]),
        ("135M", RTN, 4, 512, [1.155, 1.246]),
        ("135M", FP8, 4, 256, [1.153, 1.536]),
        ("135M", STATIC, 16, 256, [1.173, 1.536]),
        ("490M", GPTQ, 2, 64, [2.326]),
        ("490M", FP8, 4, 128, [2.574, 3.182]),
    ],
)
def test_the_host_holds_what_both_operations_need(
    tmp_path: Path, model: str, recipe: Recipe, num_samples: int, length: int, peaks_gb: list[float]
) -> None:
    calibration = Calibration(num_samples=num_samples, max_sequence_length=length)
    expected = estimate(tmp_path, model, recipe, calibration).host_memory_bytes / 1e9
    assert expected > max(peaks_gb)
    if len(peaks_gb) == 2:
        assert expected < 1.34 * max(peaks_gb)


def test_the_gpu_holds_what_calibration_was_measured_to_hold(tmp_path: Path) -> None:
    """23 GiB for 512 samples of 2048 tokens on an H200; comparing the models takes more than that."""
    much = Calibration(num_samples=512, max_sequence_length=2048)
    found = estimate(tmp_path, "8B", GPTQ, much, gpu=140 << 30)
    assert found.device_memory_bytes > 23 << 30
    assert found.host_memory_bytes < estimate(tmp_path, "8B", GPTQ, much).host_memory_bytes
