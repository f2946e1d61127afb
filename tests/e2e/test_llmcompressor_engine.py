"""The real llmcompressor engine, started as its parent starts it, on real checkpoints of a few thousand weights."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.llmcompressor_engine import (
    DEADLINE_S,
    EngineRun,
    command,
    evaluate_request,
    quantize_request,
    read_until,
    run_engine,
)

QUANTIZED_LAYERS = 14  # seven in each of the two decoder layers
LONG = {"num_samples": 600, "max_sequence_length": 512}  # seconds of work for the tiny checkpoint


@pytest.fixture(scope="module")
def artifacts(
    engine_python: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, EngineRun]]:
    """A model directory for each scheme, with the run that made it."""
    recipes: dict[str, dict[str, Any]] = {
        "W4A16": {"scheme": "W4A16"},
        "W4A16 asymmetric": {"scheme": "W4A16", "symmetric": False},
        "W8A16": {"scheme": "W8A16", "group_size": -1},
        "W8A8_INT8": {"scheme": "W8A8_INT8", "group_size": 0},
    }
    made = {}
    for name, recipe in recipes.items():
        directory = tmp_path_factory.mktemp("engine")
        request = quantize_request(tiny_checkpoint, directory / "model", **recipe)
        made[name] = (directory / "model", run_engine(engine_python, request, directory))
    return made


@pytest.mark.parametrize(
    ("name", "weights", "activations"),
    [
        ("W4A16", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}, None),
        ("W4A16 asymmetric", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None),
        ("W8A16", {"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": True}, None),
        (
            "W8A8_INT8",
            {"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": True},
            {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True},
        ),
    ],
)
def test_a_scheme_becomes_a_compressed_tensors_model_directory(
    artifacts: dict[str, tuple[Path, EngineRun]],
    name: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
) -> None:
    """config.json says how weights and activations are stored, and every layer but the head is quantized."""
    model, run = artifacts[name]
    assert run.exit_status == 0, run.stderr
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["lm_head"]
    assert group["targets"] == ["Linear"]
    assert weights.items() <= group["weights"].items()
    assert (group["input_activations"] is None) == (activations is None)
    assert (activations or {}).items() <= (group["input_activations"] or {}).items()
    assert run.last["num_quantized_modules"] == QUANTIZED_LAYERS
    assert ("zero_point" in run_tensor_names(model)) == (not weights["symmetric"])


def run_tensor_names(model: Path) -> str:
    """The header of the weights, which names the tensors."""
    with (model / "model.safetensors").open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def test_events_are_progress_by_layer_and_one_result_last(artifacts: dict[str, tuple[Path, EngineRun]]) -> None:
    """Standard output holds nothing else, whatever the libraries print."""
    _, run = artifacts["W4A16"]
    assert [event["event"] for event in run.progress] == ["progress"] * 3
    assert [event["completed"] for event in run.progress] == [0, 1, 2]
    assert {(event["phase"], event["total"], event["unit"]) for event in run.progress} == {("quantize", 2, "layers")}
    assert "loss" not in run.progress[0]
    assert all(event["loss"] > 0 for event in run.progress[1:])
    assert run.last["event"] == "result"
    assert run.last["versions"].keys() == {"llmcompressor", "torch", "transformers", "compressed-tensors", "python"}
    assert run.last["calibration"]["digest"].startswith("sha256:")
    assert run.last["calibration"]["num_tokens"] == 16 * 128
    assert run.last["peak_memory_bytes"] > 1 << 20


def test_the_companions_of_the_weights_are_the_sources_own(
    artifacts: dict[str, tuple[Path, EngineRun]], tiny_checkpoint: Path
) -> None:
    """Tokenizer, chat template and generation config are byte for byte those of the source; nothing else is added."""
    model, _ = artifacts["W4A16"]
    companions = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert {path.name for path in model.iterdir()} == companions | {"config.json", "model.safetensors"}
    for name in companions:
        assert (model / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert str(tiny_checkpoint) not in (model / "config.json").read_text()


def test_the_same_request_gives_the_same_bytes(
    artifacts: dict[str, tuple[Path, EngineRun]], engine_python: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A second run writes identical files from identical calibration tokens."""
    first, run = artifacts["W4A16"]
    again = run_engine(engine_python, quantize_request(tiny_checkpoint, tmp_path / "model"), tmp_path)
    assert digests(tmp_path / "model") == digests(first)
    assert again.last["calibration"] == run.last["calibration"]


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_weights_are_those_of_plain_llm_compressor(
    artifacts: dict[str, tuple[Path, EngineRun]], engine_python: Path
) -> None:
    """What makes the engine fast changes no weight, but for ties between two roundings."""
    model, _ = artifacts["W4A16 asymmetric"]
    script = Path(__file__).parents[1] / "support/plain_llmcompressor.py"
    done = subprocess.run(
        [engine_python, script, model.parent / "quantize.json", model],
        capture_output=True,
        check=True,
        text=True,
        timeout=DEADLINE_S,
    )
    compared = json.loads(done.stdout.splitlines()[-1])  # the libraries print before it
    assert compared["weights"] > 10_000
    assert compared["differing"] < 0.005


@pytest.mark.parametrize("name", ["W4A16", "W8A8_INT8"])
def test_the_evaluation_agrees_with_a_plain_one(
    artifacts: dict[str, tuple[Path, EngineRun]], engine_python: Path, tiny_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """What is computed piece by piece is what whole logits in double precision and transformers' own states give."""
    request = evaluate_request(tiny_checkpoint, artifacts[name][0])
    run = run_engine(engine_python, request, tmp_path)
    assert run.exit_status == 0, run.stderr
    assert [event["completed"] for event in run.progress] == [256, 512, 700]
    assert {(event["phase"], event["total"], event["unit"]) for event in run.progress} == {("evaluate", 700, "tokens")}
    assert run.last["num_tokens"] == 700
    script = Path(__file__).parents[1] / "support/plain_evaluation.py"
    done = subprocess.run(
        [engine_python, script, tmp_path / "evaluate.json"], capture_output=True, check=True, timeout=DEADLINE_S
    )
    plain = json.loads(done.stdout)
    layers = [(each["layer"], pytest.approx(each["relative_error"], rel=1e-3)) for each in plain.pop("layer_losses")]
    assert [(each["layer"], each["relative_error"]) for each in run.last["layer_losses"]] == layers
    assert {key: run.last[key] for key in plain} == pytest.approx(plain, rel=1e-3, abs=1e-7)
    assert 0 < run.last["mean_kl_divergence"] < run.last["p99_kl_divergence"]
    assert run.last["peak_memory_bytes"] > 1 << 20


def test_an_untied_head_and_ignored_layers_stay_as_they_are(
    engine_python: Path, untied_checkpoint: Path, tmp_path: Path
) -> None:
    """Regular expressions and exact names both leave layers alone, and the head need not be named."""
    ignore = ["re:.*self_attn.*", "model.layers.1.mlp.down_proj"]
    run = run_engine(engine_python, quantize_request(untied_checkpoint, tmp_path / "model", ignore=ignore), tmp_path)
    assert run.exit_status == 0, run.stderr
    assert run.last["num_quantized_modules"] == 5
    names = json.loads(run_tensor_names(tmp_path / "model"))
    assert names["lm_head.weight"]["dtype"] == "BF16"
    assert names["model.layers.0.self_attn.q_proj.weight"]["dtype"] == "BF16"
    assert names["model.layers.1.mlp.down_proj.weight"]["dtype"] == "BF16"
    assert "model.layers.0.mlp.down_proj.weight_packed" in names


def test_chat_lines_are_calibrated_with_through_the_chat_template(
    engine_python: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A user's own JSONL takes the place of the built-in text; samples of different lengths are taken as they are."""
    path = tmp_path / "chats.jsonl"
    chats = [
        [{"role": "user", "content": "Say it. " * (1 + 7 * n)}, {"role": "assistant", "content": "It."}]
        for n in range(9)
    ]
    path.write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
    request = quantize_request(tiny_checkpoint, tmp_path / "model", path=str(path), packing="TRUNCATE", num_samples=8)
    run = run_engine(engine_python, request, tmp_path)
    assert run.exit_status == 0, run.stderr
    used = run.last["calibration"]
    assert (used["num_samples"], used["num_documents"], used["uncalibrated_modules"]) == (8, 8, [])
    assert 8 * 16 < used["num_tokens"] < 8 * 128


@pytest.mark.parametrize(
    ("changes", "reason", "metadata"),
    [
        ({"ignore": ["re:.*experts.*"]}, "IGNORE_MATCHES_NOTHING", {"pattern": "re:.*experts.*"}),
        ({"ignore": ["re:("]}, "IGNORE_INVALID", {"pattern": "re:("}),
        ({"ignore": ["re:.*"]}, "NOTHING_QUANTIZED", {}),
        ({"group_size": 48}, "GROUP_SIZE_DOES_NOT_DIVIDE", {"group_size": "48", "in_features": "64"}),
        ({"max_sequence_length": 1024}, "SEQUENCE_TOO_LONG", {"sequence_length": "1024", "context_length": "512"}),
        ({"path": "chats.jsonl"}, "CALIBRATION_INVALID", {"file": "chats.jsonl", "line": "2"}),
        ({"path": "short.txt"}, "CALIBRATION_TOO_SMALL", {"available_samples": "0", "num_samples": "16"}),
        ({"path": "missing.txt"}, "ENGINE_ERROR", {"exception": "FileNotFoundError"}),
        ({"scheme": "W2A16"}, "REQUEST_INVALID", {"field": "request.recipe.scheme"}),
    ],
)
def test_what_cannot_be_done_is_one_error_event(
    engine_python: Path,
    tiny_checkpoint: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    reason: str,
    metadata: dict[str, str],
) -> None:
    """It is the last event, says what is wrong by a stable reason and details, and leaves no model behind."""
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n{"text": "Hello"}\n')
    (tmp_path / "short.txt").write_text("Too short.")
    run = run_engine(engine_python, quantize_request(tiny_checkpoint, tmp_path / "model", **changes), tmp_path)
    assert run.exit_status == 1
    assert run.last["event"] == "error"
    assert run.last["reason"] == reason
    assert run.last["message"]
    assert metadata.items() <= run.last["metadata"].items()
    assert not (tmp_path / "model").exists()


def test_what_lies_in_the_output_directory_is_not_written_over(
    engine_python: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A directory that is not empty is an error, and stays as it is."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    run = run_engine(engine_python, quantize_request(tiny_checkpoint, tmp_path / "model"), tmp_path)
    assert run.last["reason"] == "OUTPUT_NOT_EMPTY"
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_weights_that_are_missing_are_not_invented(engine_python: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint that lacks a layer is an error, where transformers alone would fill in noise."""
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    run = run_engine(engine_python, quantize_request(source, tmp_path / "model"), tmp_path)
    assert run.last["reason"] == "CHECKPOINT_INCOMPLETE"
    assert "model.layers.2" in run.last["message"]


def test_weights_that_are_not_numbers_are_not_published(
    engine_python: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A NaN in the source ends the run before any work."""
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, source)
    weights = bytearray((source / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(weights[:8], "little")
    name = "model.layers.1.mlp.up_proj.weight"
    offset = start + json.loads(weights[8:start])[name]["data_offsets"][0]
    weights[offset : offset + 2] = b"\xc0\x7f"  # NaN in bfloat16
    (source / "model.safetensors").write_bytes(weights)
    run = run_engine(engine_python, quantize_request(source, tmp_path / "model"), tmp_path)
    assert run.exit_status == 1
    assert run.last["reason"] == "NON_FINITE_WEIGHTS"
    assert run.last["metadata"] == {"tensor": name}


def test_sigterm_ends_the_engine(engine_python: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """In the middle of its work, at once."""
    request = quantize_request(tiny_checkpoint, tmp_path / "model", **LONG)
    with subprocess.Popen(
        command(engine_python, request, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as engine:
        assert engine.stdout
        read_until(engine.stdout, b'"completed": 0')
        engine.terminate()
        assert engine.wait(DEADLINE_S) == -signal.SIGTERM


def test_the_engine_dies_with_its_parent(engine_python: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A parent that is killed has no time to end it; the pipe closes because nobody is left who could write to it."""
    request = quantize_request(tiny_checkpoint, tmp_path / "model", **LONG)
    parent_command = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    with subprocess.Popen(
        parent_command + command(engine_python, request, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout
        read_until(parent.stdout, b'"completed": 0')
        parent.kill()
        events = read_until(parent.stdout, None)
    assert b'"result"' not in events


def test_an_engine_whose_parent_is_gone_already_does_nothing(
    engine_python: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The parent may die before the engine can ask to die with it."""
    request = quantize_request(tiny_checkpoint, tmp_path / "model") | {"parent_pid": 1 << 22}
    run = run_engine(engine_python, request, tmp_path)
    assert run.last["reason"] == "PARENT_GONE"


def test_what_of_the_cuda_path_needs_no_gpu(engine_python: Path) -> None:
    """Attention, Hessians and batches of the CUDA path; `benchmarks/quantization_speed.py` measures it on a GPU."""
    script = Path(__file__).parents[1] / "support/check_calibration_cuda.py"
    run = subprocess.run([engine_python, script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["check_attention", "check_mirror", "check_plan"]
