"""Every scheme of the llmcompressor engine: made by it, and those that have a CPU kernel served by the real vLLM."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.llmcompressor_engine import quantize_request

SUPPORT = Path(__file__).parents[1] / "support"
LAYERS = 14  # seven in each of the two decoder layers
DEADLINE_S = 600

# Many artifacts and models in a process: on a host busy with other work that takes minutes.
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

Made = dict[str, tuple[Path, dict[str, Any]]]

# The tiny checkpoint takes 246 kB; with one layer as it is and 4 bits in the others 156 kB.
ADAPTIVE_BUDGET = 158_000
UNQUANTIZED = {"scheme": "UNQUANTIZED", "algorithm": "NONE", "group_size": 0}
# A file that is not there: whoever reads calibration data fails.
NO_DATA = {"path": "/nowhere/calibration.txt"}


def rule(pattern: str, scheme: str, algorithm: str, group_size: int = 0) -> dict[str, Any]:
    fields = {"scheme": scheme, "algorithm": algorithm, "group_size": group_size}
    return {"pattern": pattern, "symmetric": True, **fields}


def candidate(scheme: str, group_size: int = 0) -> dict[str, Any]:
    return {"scheme": scheme, "algorithm": "GPTQ", "group_size": group_size, "symmetric": True}


def fixed(scheme: str, **changes: Any) -> dict[str, Any]:
    return {"scheme": scheme, "algorithm": "RTN", "group_size": 0, **changes}


RECIPES: dict[str, dict[str, Any]] = {
    "W4A16 static order": {"activation_order": "STATIC"},
    "W4A16 channel": {"group_size": -1},
    "W4A16 asymmetric": {"symmetric": False},
    "W4A16 AWQ": {"algorithm": "AWQ"},
    "W4A16 AWQ asymmetric": {"algorithm": "AWQ", "symmetric": False},
    "W4A16 RTN": {"algorithm": "RTN", **NO_DATA},
    "W8A16": {"scheme": "W8A16", "group_size": -1},
    "W8A16 RTN": {"scheme": "W8A16", "algorithm": "RTN", **NO_DATA},
    "W8A8 smoothed": {"scheme": "W8A8_INT8", "group_size": 0, "smoothing_strength": 0.8},
    "W8A8 RTN": fixed("W8A8_INT8", **NO_DATA),
    "FP8 dynamic": fixed("FP8_DYNAMIC", **NO_DATA),
    "FP8 static": fixed("FP8_STATIC"),
    "FP8 block": fixed("FP8_BLOCK", **NO_DATA),
    "NVFP4A16": fixed("NVFP4A16", **NO_DATA),
    "MXFP4A16": fixed("MXFP4A16", **NO_DATA),
    "16 bits": UNQUANTIZED | NO_DATA,
    "16 bits, FP8 cache": UNQUANTIZED | {"kv_cache": "FP8"},
    "FP8 dynamic, FP8 cache": fixed("FP8_DYNAMIC", kv_cache="FP8"),
    "FP8 attention only": UNQUANTIZED | NO_DATA | {"rules": [rule("re:.*(q|k|v)_proj$", "FP8_DYNAMIC", "RTN")]},
    "W4A16 with W8A8 down": {"rules": [rule("re:.*down_proj$", "W8A8_INT8", "GPTQ")]},
    "W4A16 of every kind": {
        "algorithm": "AWQ",
        "rules": [
            rule("model.layers.0.mlp.down_proj", "UNQUANTIZED", "NONE"),
            rule("re:.*down_proj$", "FP8_DYNAMIC", "RTN"),
            rule("re:.*layers.1.*(gate|up)_proj", "W4A16", "GPTQ", -1),
        ],
    },
    "ADAPTIVE": {
        "scheme": "ADAPTIVE",
        "algorithm": "NONE",
        "group_size": 0,
        "adaptive": {
            "candidates": [
                *(candidate("W4A16", size) for size in (-1, 128, 64, 32)),
                candidate("W8A8_INT8"),
                {"symmetric": True, **UNQUANTIZED},
            ],
            "max_size_bytes": ADAPTIVE_BUDGET,
            "max_perplexity_ratio": None,
            "num_samples": 2,
        },
        "rules": [rule("model.layers.0.mlp.down_proj", "UNQUANTIZED", "NONE")],
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "group order": ({"activation_order": "GROUP"}, "UNSUPPORTED_RECIPE", "no longer read by vLLM"),
    "asymmetric W8A16": ({"scheme": "W8A16", "symmetric": False}, "UNSUPPORTED_RECIPE", "only W4A16 may be asymmetric"),
    "AWQ of 8 bits": ({"scheme": "W8A16", "algorithm": "AWQ"}, "UNSUPPORTED_RECIPE", "AWQ is not done for W8A16"),
    "smoothed W4A16": ({"smoothing_strength": 0.5}, "UNSUPPORTED_RECIPE", "smoothing_strength must be 0"),
    "split heads": ({"rules": [rule("re:.*k_proj", "W8A16", "RTN", -1)]}, "SPLITS_FUSED_LAYERS", "one matrix"),
}

FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
EIGHT_BITS = FOUR_BITS | {"num_bits": 8}
BY_CHANNEL = {"strategy": "channel", "group_size": None}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
STORED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "W4A16 static order": ("pack-quantized", FOUR_BITS | {"actorder": "static"}, None),
    "W4A16 channel": ("pack-quantized", FOUR_BITS | BY_CHANNEL, None),
    "W4A16 asymmetric": ("pack-quantized", FOUR_BITS | {"symmetric": False}, None),
    "W4A16 AWQ": ("pack-quantized", FOUR_BITS, None),
    "W4A16 AWQ asymmetric": ("pack-quantized", FOUR_BITS | {"symmetric": False}, None),
    "W4A16 RTN": ("pack-quantized", FOUR_BITS, None),
    "W8A16": ("pack-quantized", EIGHT_BITS | BY_CHANNEL, None),
    "W8A16 RTN": ("pack-quantized", EIGHT_BITS, None),
    "W8A8 smoothed": ("int-quantized", EIGHT_BITS | BY_CHANNEL, {"num_bits": 8, "type": "int", "dynamic": True}),
    "W8A8 RTN": ("int-quantized", EIGHT_BITS | BY_CHANNEL, {"num_bits": 8, "type": "int", "dynamic": True}),
    "FP8 dynamic": ("float-quantized", FP8 | BY_CHANNEL, FP8 | {"strategy": "token", "dynamic": True}),
    "FP8 static": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": False}),
    "FP8 block": (
        "float-quantized",
        FP8 | {"strategy": "block", "block_structure": [128, 128]},
        FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "NVFP4A16": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        None,
    ),
    "MXFP4A16": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None),
}

CALIBRATED = [name for name, recipe in RECIPES.items() if "path" not in recipe]

# vLLM's scheme classes for those that its CPU build has kernels for.
W4A16, INT8, FP8_CLASS, AS_IT_IS = (
    "CompressedTensorsWNA16",
    "CompressedTensorsW8A8Int8",
    "CompressedTensorsW8A8Fp8",
    "UnquantizedLinearMethod",
)
FOUR_BIT_RECIPES = ("W4A16 channel", "W4A16 asymmetric", "W4A16 AWQ")
SERVED: dict[str, dict[str, str]] = {
    **{name: {"layers.0.self_attn.qkv_proj": W4A16, "layers.1.mlp.down_proj": W4A16} for name in FOUR_BIT_RECIPES},
    "W8A8 smoothed": {"layers.0.mlp.gate_up_proj": INT8, "layers.1.self_attn.qkv_proj": INT8},
    "FP8 dynamic": {"layers.0.mlp.gate_up_proj": FP8_CLASS},
    "16 bits": {"layers.0.mlp.gate_up_proj": AS_IT_IS},
    "16 bits, FP8 cache": {
        "layers.0.mlp.gate_up_proj": AS_IT_IS,
        "layers.1.self_attn.attn": "CompressedTensorsKVCacheMethod",
    },
    "FP8 attention only": {"layers.1.self_attn.qkv_proj": FP8_CLASS, "layers.1.self_attn.o_proj": AS_IT_IS},
    "W4A16 with W8A8 down": {"layers.0.mlp.down_proj": INT8, "layers.0.mlp.gate_up_proj": W4A16},
    "W4A16 of every kind": {
        "layers.0.mlp.down_proj": AS_IT_IS,
        "layers.1.mlp.down_proj": FP8_CLASS,
        "layers.1.mlp.gate_up_proj": W4A16,
    },
    "ADAPTIVE": {},  # what it chose
}


@pytest.fixture(scope="module")
def made(engine_python: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All recipes, by one process of the engine: the model directory, and the result or the error."""
    directory = tmp_path_factory.mktemp("schemes")
    recipes = RECIPES | {name: recipe for name, (recipe, _, _) in REFUSED.items()}
    models = {name: directory / name.replace(" ", "-").replace(",", "") for name in recipes}
    small = {"num_samples": 4, "max_sequence_length": 64}
    requests = [quantize_request(tiny_checkpoint, models[name], **small | recipe) for name, recipe in recipes.items()]
    (directory / "requests.json").write_text(json.dumps(requests))
    answers = run(engine_python, SUPPORT / "quantize_many.py", directory / "requests.json")
    return {name: (models[name], answer) for name, answer in zip(recipes, answers, strict=True)}


@pytest.fixture(scope="module")
def served(inference_python: Path, made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each, one after the other in one process."""
    path = tmp_path_factory.mktemp("served") / "models.json"
    path.write_text(json.dumps([{"model": str(made[name][0])} for name in SERVED]))
    return dict(zip(SERVED, run(inference_python, SUPPORT / "vllm_many.py", path), strict=True))


def run(python: Path, script: Path, argument: Path) -> list[dict[str, Any]]:
    done = subprocess.run([python, script, argument], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def tensors_of(model: Path) -> dict[str, Any]:
    """The header of the weights: data type, shape and offsets by name."""
    with (model / "model.safetensors").open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


@pytest.mark.parametrize("name", STORED)
def test_a_scheme_is_stored_as_it_says(made: Made, name: str) -> None:
    """config.json says how weights and activations are stored."""
    model, answer = made[name]
    assert "reason" not in answer, answer
    layout, weights, activations = STORED[name]
    config = config_of(model)["quantization_config"]
    [group] = config["config_groups"].values()
    assert (config["format"], group["format"], group["targets"]) == (layout, layout, ["Linear"])
    assert weights.items() <= group["weights"].items()
    assert (activations or {}).items() <= (group["input_activations"] or {}).items()
    assert (group["input_activations"] is None) == (activations is None)
    assert config["kv_cache_scheme"] is None


@pytest.mark.parametrize("name", RECIPES)
def test_data_is_read_only_where_it_is_needed(made: Made, name: str) -> None:
    """The result says what it was calibrated with, and for a recipe that needs no data that it was with nothing."""
    _, answer = made[name]
    assert "reason" not in answer, answer
    if name in CALIBRATED:
        assert answer["calibration"]["num_tokens"] == 4 * 64
    else:
        assert answer["calibration"] is None


@pytest.mark.parametrize("name", RECIPES)
def test_each_layer_has_a_row_that_says_what_it_is(made: Made, name: str) -> None:
    """In the model's order; GPTQ's loss where GPTQ rounded."""
    model, answer = made[name]
    rows = answer["modules"]
    assert len(rows) == LAYERS
    assert [row["name"] for row in rows][:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    quantized = {
        tensor.removesuffix(".weight_scale") for tensor in tensors_of(model) if tensor.endswith(".weight_scale")
    }
    assert {row["name"] for row in rows if row["scheme"] != "UNQUANTIZED"} == quantized
    assert answer["num_quantized_modules"] == len(quantized)
    recipe = {"scheme": "W4A16", "algorithm": "GPTQ"} | RECIPES[name]
    if not recipe.get("rules"):
        assert {row["scheme"] for row in rows} <= {recipe["scheme"], "UNQUANTIZED"}
        assert all((row["loss"] is not None) == (recipe["algorithm"] == "GPTQ") for row in rows)


def test_rules_treat_layers_by_name(made: Made) -> None:
    rows = {row["name"]: row for row in made["W4A16 of every kind"][1]["modules"]}
    treated = {
        name: (row["scheme"], row["group_size"]) for name, row in rows.items() if "layers.1" in name or "down" in name
    }
    assert treated.pop("model.layers.0.mlp.down_proj") == ("UNQUANTIZED", 0)
    assert treated.pop("model.layers.1.mlp.down_proj") == ("FP8_DYNAMIC", 0)
    assert treated.pop("model.layers.1.mlp.gate_proj") == ("W4A16", -1)
    assert treated.pop("model.layers.1.mlp.up_proj") == ("W4A16", -1)
    assert set(treated.values()) == {("W4A16", 32)}
    assert rows["model.layers.1.mlp.up_proj"]["loss"] > 0
    assert rows["model.layers.0.mlp.up_proj"]["loss"] is None


def test_layers_that_no_kernel_takes_are_left_and_say_so(made: Made) -> None:
    """Of the tiny checkpoint only down_proj has groups of 128 inputs, which block FP8 needs."""
    rows = made["FP8 block"][1]["modules"]
    assert {row["name"] for row in rows if row["scheme"] == "FP8_BLOCK"} == {
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }
    assert all(("is left as it is" in row["remark"]) == (row["scheme"] == "UNQUANTIZED") for row in rows)


def test_sixteen_bits_are_the_sources_own(made: Made, tiny_checkpoint: Path) -> None:
    """Nothing is quantized, and config.json does not say that something was."""
    model, answer = made["16 bits"]
    assert (model / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    assert "quantization_config" not in config_of(model)
    assert answer["num_quantized_modules"] == 0


@pytest.mark.parametrize("name", ["16 bits, FP8 cache", "FP8 dynamic, FP8 cache"])
def test_an_fp8_cache_has_calibrated_scales(made: Made, name: str) -> None:
    """One for the keys and one for the values of each layer, and a config that says so, quantized weights or not."""
    model, _ = made[name]
    config = config_of(model)["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert config["quant_method"] == "compressed-tensors"
    assert scheme.items() <= config["kv_cache_scheme"].items()
    assert bool(config["config_groups"]) == (name != "16 bits, FP8 cache")
    for layer in (0, 1):
        for scale in ("k_scale", "v_scale"):
            assert f"model.layers.{layer}.self_attn.{scale}" in tensors_of(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_and_leaves_nothing(made: Made, name: str) -> None:
    model, answer = made[name]
    _, reason, words = REFUSED[name]
    assert answer["reason"] == reason
    assert words in answer["message"]
    assert not model.exists()


@pytest.mark.parametrize("name", SERVED)
def test_vllm_serves_it_on_the_cpu(served: dict[str, dict[str, Any]], name: str) -> None:
    """With the kernels that the recipe promises, and with nearly the source's probabilities."""
    answer = served[name]
    assert "error" not in answer, answer
    for layer, kind in SERVED[name].items():
        assert answer["schemes"][f"model.{layer}"].split("/")[0] == kind
    assert all(math.isfinite(logprob) for logprob in answer["logprobs"])
    differences = [abs(a - b) for a, b in zip(answer["logprobs"], served["16 bits"]["logprobs"], strict=True)]
    assert sum(differences) / len(differences) < 0.05


def test_adaptive_keeps_its_budget_and_says_what_it_chose(made: Made) -> None:
    """A mixture, one row for each choice and candidate; rules go first; the layers' own rows say the same."""
    model, answer = made["ADAPTIVE"]
    assert (model / "model.safetensors").stat().st_size <= ADAPTIVE_BUDGET
    assert [event["unit"] for event in answer["events"]] == ["measurements"] * 8 + ["layers"] * 3
    chosen = [row for row in answer["sensitivities"] if row["chosen"]]
    assert len(chosen) == 7
    assert len({row["scheme"] for row in chosen}) > 1
    treated = {name: (row["scheme"], row["group_size"]) for row in chosen for name in row["modules"]}
    treated["model.layers.0.mlp.down_proj"] = ("UNQUANTIZED", 0)
    assert treated == {row["name"]: (row["scheme"], row["group_size"]) for row in answer["modules"]}


def test_vllm_serves_what_adaptive_chose(made: Made, served: dict[str, dict[str, Any]]) -> None:
    kinds = {"W4A16": W4A16, "W8A8_INT8": INT8, "UNQUANTIZED": AS_IT_IS}
    for row in (row for row in made["ADAPTIVE"][1]["sensitivities"] if row["chosen"]):
        parent, _, leaf = row["modules"][0].rpartition(".")
        fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}.get(leaf, leaf)
        assert served["ADAPTIVE"]["schemes"][f"{parent}.{fused}"].split("/")[0] == kinds[row["scheme"]], row


def test_adaptive_measures_what_it_says(engine_python: Path) -> None:
    """The checks of divergences, sizes, roundings and budgets on small models; each says what it is about."""
    script = SUPPORT / "check_adaptive.py"
    done = subprocess.run([engine_python, script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("check_")]) == 12


def test_rounding_is_exact_and_survives_bad_numbers(engine_python: Path) -> None:
    """The checks of damping, smoothing, dead channels and numbers that are none; each says what it is about."""
    script = SUPPORT / "check_rounding.py"
    done = subprocess.run([engine_python, script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("check_")]) == 10
