"""What every quantization engine promises, on each that BITMILL_TEST_ENGINES names.

auto_gptq needs a GPU: `BITMILL_TEST_ENGINES=auto_gptq pytest tests/e2e/test_engines.py` on a host that has one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bitmill_quantizer.recipes.engines import ENGINES
from support.llmcompressor_engine import Event, evaluate_request, quantize_request

REPOSITORY = Path(__file__).parents[2]
SUPPORT = REPOSITORY / "tests/support"
NAMES = os.environ.get("BITMILL_TEST_ENGINES", "llmcompressor,gptqmodel").split(",")
DEADLINE_S = 280
QUANTIZED_LAYERS = 14  # seven in each of the two decoder layers
IGNORED = ["re:.*self_attn.*", "model.layers.1.mlp.down_proj"]
# What vLLM is given to read, in support/vllm_many.py.
PROMPT = "The quick brown fox jumps over the lazy dog, and the with statement is used to wrap the execution of a block."
REFUSALS = [
    ({"ignore": ["re:.*experts.*"]}, "IGNORE_MATCHES_NOTHING", {"pattern": "re:.*experts.*"}),
    ({"ignore": ["re:.*"]}, "NOTHING_QUANTIZED", {}),
    ({"group_size": 128}, "GROUP_SIZE_DOES_NOT_DIVIDE", {"group_size": "128", "in_features": "64"}),
    ({"max_sequence_length": 1024}, "SEQUENCE_TOO_LONG", {"sequence_length": "1024", "context_length": "512"}),
    ({"path": "short.txt"}, "CALIBRATION_TOO_SMALL", {"available_samples": "0", "num_samples": "16"}),
    ({"path": "missing.txt"}, "ENGINE_ERROR", {}),
    ({"scheme": "W2A16"}, "REQUEST_INVALID", {"field": "request.recipe.scheme"}),
]
CLASSIC_REFUSALS = [
    ({"scheme": "FP8_DYNAMIC", "algorithm": "RTN", "group_size": 0}, "UNSUPPORTED_RECIPE", {"field": "scheme"}),
    ({"algorithm": "AWQ"}, "UNSUPPORTED_RECIPE", {"field": "algorithm"}),
    ({"symmetric": False}, "UNSUPPORTED_RECIPE", {"field": "symmetric"}),
    ({"activation_order": "GROUP"}, "UNSUPPORTED_RECIPE", {"field": "activation_order"}),
    ({"kv_cache": "FP8"}, "UNSUPPORTED_RECIPE", {"field": "kv_cache"}),
    (
        {"num_samples": 1, "max_sequence_length": 16, "dampening_frac": 1e-12},
        "HESSIAN_NOT_INVERTIBLE",
        {"dampening_frac": "1e-09"},
    ),
]


@dataclass(frozen=True)
class Answer:
    """What an engine said to one request."""

    progress: list[Event]
    last: Event


@dataclass(frozen=True)
class Engine:
    """An engine, and what it made once for all tests: model directories by name, with the answers."""

    name: str
    python: Path
    directory: Path
    answers: dict[str, Answer]

    @property
    def layout(self) -> str:
        return ENGINES[self.name].format

    @property
    def architectures(self) -> list[str]:
        """Those that the server hands to it; empty for the engine that has tests of its own for all of them."""
        return sorted(ENGINES[self.name].architectures or ())

    @property
    def module(self) -> str:
        return f"bitmill_engine_{self.name}"

    def model(self, name: str) -> Path:
        return self.directory / name

    def result(self, name: str) -> Event:
        answer = self.answers[name]
        assert answer.last["event"] == "result", answer.last
        return answer.last


@pytest.fixture(scope="module", params=NAMES)
def engine(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Path,
    tiny_families: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Engine:
    """Every request of these tests, answered in one process of the engine."""
    name: str = request.param
    python = REPOSITORY / f"services/quantizer/engines/{name}/.venv/bin/python"
    assert python.exists(), f"there is no {python}: run make setup-engine-{name}"
    directory = tmp_path_factory.mktemp(name)
    (directory / "short.txt").write_text("Too short.")
    line = json.dumps({"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]})
    (directory / "chats.jsonl").write_text(f"{line}\n" * 200)
    requests = _requests(name, tiny_checkpoint, tiny_families, directory)
    answers = _answer(python, f"bitmill_engine_{name}", list(requests.values()), directory)
    return Engine(name, python, directory, dict(zip(requests, answers, strict=True)))


def _requests(name: str, tied: Path, families: Path, directory: Path) -> dict[str, dict[str, Any]]:
    untied = families / "LlamaForCausalLM"

    def quantize(model: str, source: Path = tied, **changes: Any) -> dict[str, Any]:
        if "path" in changes:
            changes["path"] = str(directory / changes["path"])
        return quantize_request(source, directory / model, **changes)

    as_it_is = {"scheme": "UNQUANTIZED", "algorithm": "NONE", "group_size": 0, "symmetric": True}
    made = {
        "W4A16": quantize("W4A16"),
        "W4A16 static": quantize("W4A16 static", activation_order="STATIC"),
        "W8A16": quantize("W8A16", scheme="W8A16", group_size=-1),
        "chats": quantize("chats", path="chats.jsonl", num_samples=4),
        "ignored": quantize("ignored", untied, ignore=IGNORED),
        # Sixteen tokens span less than the inputs of any layer.
        "damped": quantize("damped", num_samples=1, max_sequence_length=16, dampening_frac=1e-7),
        "rule": quantize("rule", untied, rules=[{"pattern": "re:.*down_proj", **as_it_is}]),
    }
    made |= {each: quantize(each, families / each, num_samples=8) for each in sorted(ENGINES[name].architectures or ())}
    evaluated = {f"evaluate {each}": evaluate_request(tied, directory / each) for each in ("W4A16", "W8A16")}
    refused = {
        f"refused {index}": quantize(f"refused {index}", **dict(changes))
        for index, (changes, _, _) in enumerate([*REFUSALS, *CLASSIC_REFUSALS])
    }
    return made | evaluated | refused


def _answer(python: Path, module: str, requests: Sequence[dict[str, Any]], directory: Path) -> list[Answer]:
    path = directory / "requests.json"
    path.write_text(json.dumps(requests))
    answers = json.loads(_last_line(python, "engine_many.py", module, path))
    return [Answer(each["events"], each["last"]) for each in answers]


def test_events_are_progress_by_layer_and_one_result_last(engine: Engine) -> None:
    """Progress counts decoder layers up, with the loss of each; the result says what was used and made."""
    result = engine.result("W4A16")
    progress = engine.answers["W4A16"].progress
    assert [event["completed"] for event in progress] == [0, 1, 2]
    assert {(event["phase"], event["total"], event["unit"]) for event in progress} == {("quantize", 2, "layers")}
    assert all(event["loss"] > 0 for event in progress[1:])
    assert {"torch", "transformers", "python"} < result["versions"].keys()
    assert result["format"] == engine.layout
    assert result["num_quantized_modules"] == QUANTIZED_LAYERS
    assert result["calibration"]["digest"].startswith("sha256:")
    assert (result["calibration"]["num_samples"], result["calibration"]["num_tokens"]) == (16, 16 * 128)
    assert result["peak_memory_bytes"] > 1 << 20


def test_each_layer_has_a_row(engine: Engine) -> None:
    """In the model's order, with its scheme and loss."""
    rows = engine.result("W4A16")["modules"]
    assert len(rows) == QUANTIZED_LAYERS
    assert rows[0]["name"] == "model.layers.0.self_attn.q_proj"
    assert {(row["scheme"], row["group_size"], row["dampening_frac"], row["remark"]) for row in rows} == {
        ("W4A16", 32, None, "")
    }
    assert all(row["loss"] > 0 for row in rows)


def test_a_hessian_that_does_not_invert_is_damped_more(engine: Engine) -> None:
    """Ten times as much at a time, and the layer's row says how much it took."""
    dampings = {row["dampening_frac"] for row in engine.result("damped")["modules"]}
    assert dampings - {None}
    assert all(any(math.isclose(each, 1e-7 * 10**n) for n in (1, 2, 3)) for each in dampings - {None})


def test_config_says_how_the_weights_are_stored(engine: Engine, tiny_checkpoint: Path) -> None:
    """By the layout's own terms; all else is the source's."""
    config = json.loads((engine.model("W4A16 static") / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert quantization["quant_method"] == engine.layout
    if engine.layout == "gptq":
        expected = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
        assert expected.items() <= quantization.items()
        assert config == json.loads((tiny_checkpoint / "config.json").read_text())


def test_the_companions_of_the_weights_are_the_sources_own(engine: Engine, tiny_checkpoint: Path) -> None:
    """Tokenizer, chat template and generation config are byte for byte those of the source; nothing else is added."""
    model = engine.model("W4A16")
    companions = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert {path.name for path in model.iterdir()} == companions | {"config.json", "model.safetensors"}
    for name in companions:
        assert (model / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert str(tiny_checkpoint) not in (model / "config.json").read_text()


def test_a_tied_head_is_stored_once(engine: Engine) -> None:
    assert "lm_head.weight" not in tensors(engine.model("W4A16"))
    assert "lm_head.weight" in tensors(engine.model("ignored"))


def tensors(model: Path) -> dict[str, Any]:
    """The header of the weights, which names the tensors."""
    with (model / "model.safetensors").open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return header


def test_the_activation_order_changes_the_weights(engine: Engine) -> None:
    """And not how they are stored."""
    assert tensors(engine.model("W4A16")).keys() == tensors(engine.model("W4A16 static")).keys()
    assert digests(engine.model("W4A16")) != digests(engine.model("W4A16 static"))


def test_the_same_request_gives_the_same_bytes(engine: Engine, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A run of its own, as the server starts it: exit status 0, nothing but events, identical files."""
    path = tmp_path / "quantize.json"
    path.write_text(json.dumps(quantize_request(tiny_checkpoint, tmp_path / "model", activation_order="STATIC")))
    done = subprocess.run(
        [engine.python, "-m", engine.module, path], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["progress"] * 3 + ["result"]
    assert digests(tmp_path / "model") == digests(engine.model("W4A16 static"))
    assert {each.name for each in tmp_path.iterdir()} == {"quantize.json", "model"}


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_users_chats_are_calibrated_with(engine: Engine) -> None:
    """A user's own JSONL takes the place of the built-in text."""
    use = engine.result("chats")["calibration"]
    assert (use["num_samples"], use["num_tokens"]) == (4, 4 * 128)
    assert use["digest"] != engine.result("W4A16")["calibration"]["digest"]


@pytest.mark.parametrize(("name", "kept"), [("ignored", 9), ("rule", 2)])
def test_layers_that_a_recipe_leaves_out_stay_as_they_are(engine: Engine, name: str, kept: int) -> None:
    """By ignore or by a rule; the head, which need not be named, too."""
    result, stored = engine.result(name), tensors(engine.model(name))
    unquantized = [row["name"] for row in result["modules"] if row["scheme"] == "UNQUANTIZED"]
    assert len(unquantized) == kept
    assert result["num_quantized_modules"] == QUANTIZED_LAYERS - kept
    for layer in [*unquantized, "lm_head"]:
        assert stored[f"{layer}.weight"]["dtype"] == "BF16"


@pytest.mark.parametrize("name", ["W4A16", "W8A16"])
def test_the_evaluation_is_of_finite_numbers(engine: Engine, name: str) -> None:
    """All tokens, every decoder layer, and more bits lose less."""
    result = engine.result(f"evaluate {name}")
    assert [event["completed"] for event in engine.answers[f"evaluate {name}"].progress] == [256, 512, 700]
    assert result["num_tokens"] == 700
    numbers = ["source_perplexity", "artifact_perplexity", "mean_kl_divergence", "p99_kl_divergence", "top1_agreement"]
    assert all(math.isfinite(result[each]) for each in numbers)
    assert [row["layer"] for row in result["layer_losses"]] == ["model.layers.0", "model.layers.1"]
    assert 0 < engine.result("evaluate W8A16")["mean_kl_divergence"] < result["mean_kl_divergence"] or name == "W8A16"


def refusals(engine: Engine) -> list[tuple[dict[str, Any], str, dict[str, str], Answer]]:
    """What the engine must refuse, with its answer."""
    classic = CLASSIC_REFUSALS if engine.layout == "gptq" else []
    return [(*case, engine.answers[f"refused {index}"]) for index, case in enumerate([*REFUSALS, *classic])]


def test_what_cannot_be_done_is_one_error_event(engine: Engine) -> None:
    """It is the last event, says what is wrong by a stable reason and details, and leaves no model behind."""
    for index, (changes, reason, metadata, answer) in enumerate(refusals(engine)):
        assert answer.last["event"] == "error", changes
        assert answer.last["reason"] == reason, changes
        assert answer.last["message"]
        assert metadata.items() <= answer.last["metadata"].items()
        assert not engine.model(f"refused {index}").exists()


def test_every_architecture_that_the_server_hands_to_it_is_quantized(engine: Engine) -> None:
    """The table of the server says no more than the engine does."""
    for architecture in engine.architectures:
        assert engine.result(architecture)["num_quantized_modules"] == QUANTIZED_LAYERS


def test_vllm_serves_what_each_engine_makes(engine: Engine, engine_python: Path, inference_python: Path) -> None:
    """With kernels of this host, and in the classic layout to the numbers that a plain reading of it gives."""
    names = ["W4A16 static", "ignored", "rule"]
    models = [str(engine.model(name)) for name in names]
    path = engine.directory / "models.json"
    path.write_text(json.dumps([{"model": model} for model in models]))
    served = json.loads(_last_line(inference_python, "vllm_many.py", path))
    assert all(each.get("text") for each in served), served
    if engine.layout == "gptq":
        path.write_text(json.dumps(models))
        plain = json.loads(_last_line(engine_python, "plain_gptq.py", path, PROMPT))
        for one, other in zip(served, plain, strict=True):
            differences = [abs(a - b) for a, b in zip(one["logprobs"], other, strict=True)]
            assert sum(differences) / len(differences) < 0.1  # of 16-bit arithmetic


def _last_line(python: Path, script: str, *arguments: object) -> str:
    command = [str(python), str(SUPPORT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
