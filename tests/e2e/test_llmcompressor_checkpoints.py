"""Checkpoints as they come: every architecture, layout and format that the engine takes, quantized and then served."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bitmill_common.checkpoint import inspect_source
from bitmill_common.recipes import Algorithm, Recipe, Scheme, Treatment
from bitmill_common.stores import Stores
from bitmill_quantizer.layers import ARCHITECTURES, linear_layers, row_name
from bitmill_quantizer.treatments import treat
from support.llmcompressor_engine import quantize_request

REPOSITORY = Path(__file__).parents[2]
SUPPORT = REPOSITORY / "tests/support"
DEADLINE_S = 280

DENSE = sorted(ARCHITECTURES - {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
MIXTURES = sorted(ARCHITECTURES - set(DENSE))
ODD = "LlamaForCausalLM-odd"
LINKED = "LlamaForCausalLM-linked"
# Calibrated ones; the rest are rounded to nearest, which reads no data.
GPTQ = ("LlamaForCausalLM", "Qwen2ForCausalLM", LINKED, *MIXTURES)
# vLLM's kernels for quantized experts need AMX on a CPU; the rest of a mixture it serves anywhere.
EXPERTS = r"re:.*\.experts\..*"
PARTS = tuple(f"{name}-experts-left" for name in MIXTURES)
# A checkpoint, and the type that its weights have in a GGUF file.
GGUF = {
    "Gemma3ForCausalLM": "F16",
    "LlamaForCausalLM": "Q8_0",
    "Phi3ForCausalLM": "Q4_0",
    "Qwen2ForCausalLM": "BF16",
    "Qwen3MoeForCausalLM": "F32",
}
SERVED = (*DENSE, ODD, *PARTS, *(f"{name}.gguf" for name in GGUF if name not in MIXTURES))

Answers = dict[str, dict[str, Any]]


def run_script(python: Path, script: str, *arguments: object) -> str:
    """Runs a script of tests/support and returns the last line that it prints."""
    command = [str(python), str(SUPPORT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture(scope="module")
def sources(engine_python: Path, tiny_families: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sources by name: checkpoint directories, a snapshot of links to blobs, and GGUF files."""
    found = {path.name: path for path in sorted(tiny_families.iterdir()) if path.is_dir()}
    root = tmp_path_factory.mktemp("sources")
    arguments: list[object] = []
    for name, type_name in GGUF.items():
        found[f"{name}.gguf"] = root / f"{name}.gguf"
        arguments += [tiny_families / name, type_name, found[f"{name}.gguf"]]
    run_script(engine_python, "make_tiny_gguf.py", *arguments)
    found[LINKED] = link_as_the_hub_does(tiny_families / "LlamaForCausalLM", root / "models--org--llama")
    return found


def link_as_the_hub_does(checkpoint: Path, repository: Path) -> Path:
    """Lays a copy of a checkpoint out as the Hub's cache does, every file a link to a blob."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (path for path in checkpoint.iterdir() if path.is_file()):
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        (blobs / blob).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def source_of(name: str) -> str:
    return name.removesuffix("-experts-left")


@pytest.fixture(scope="module")
def made(
    engine_python: Path, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """A directory with a W4A16 artifact of each source by its name, and the engine's answers."""
    directory = tmp_path_factory.mktemp("artifacts")
    requests = {}
    for name in (*sources, *PARTS):
        ignore = [EXPERTS] if name in PARTS else ["lm_head"]
        algorithm = "GPTQ" if name in GPTQ else "RTN"
        requests[name] = quantize_request(
            sources[source_of(name)], directory / name, algorithm=algorithm, ignore=ignore, num_samples=8
        )
    path = directory / "requests.json"
    path.write_text(json.dumps(list(requests.values())))
    answers = json.loads(run_script(engine_python, "quantize_many.py", path))
    return directory, dict(zip(requests, answers, strict=True))


@pytest.fixture(scope="module")
def served(inference_python: Path, made: tuple[Path, Answers]) -> Answers:
    """What the real vLLM answers for each artifact that a CPU serves."""
    directory, _ = made
    path = directory / "served.json"
    path.write_text(json.dumps([{"model": str(directory / name)} for name in SERVED]))
    return dict(zip(SERVED, json.loads(run_script(inference_python, "vllm_many.py", path)), strict=True))


def test_every_architecture_is_there(sources: dict[str, Path]) -> None:
    """A checkpoint of each that the server accepts."""
    assert set(sources) >= ARCHITECTURES


@pytest.mark.parametrize("name", [*sorted(ARCHITECTURES), ODD, *PARTS, *(f"{name}.gguf" for name in GGUF)])
def test_the_plan_is_what_the_engine_does(sources: dict[str, Path], made: tuple[Path, Answers], name: str) -> None:
    """The server finds the same layers by their tensors' names, and leaves the same ones out."""
    answer = made[1][name]
    assert "reason" not in answer, answer
    source = sources[source_of(name)]
    directory = source if source.is_dir() else source.parent
    store = Stores([directory.as_uri()]).open(directory.as_uri(), "uri")
    layers = linear_layers(inspect_source(store, "" if source.is_dir() else source.name))
    recipe = Recipe(Treatment(Scheme.W4A16, Algorithm.RTN, 32), ignore=(EXPERTS,) if name in PARTS else ("lm_head",))
    treated = treat(layers, recipe)
    assert not treated.problems
    rows = {row["name"]: row for row in answer["modules"]}
    assert set(rows) == {row_name(layer) for layer in layers}
    quantized = {row for row, fields in rows.items() if fields["scheme"] != "UNQUANTIZED"}
    assert quantized == {row_name(layer) for layer in treated.quantized}
    assert {row for row, fields in rows.items() if fields["remark"]} == {row_name(layer) for layer in treated.skipped}
    assert answer["num_quantized_modules"] == len(treated.quantized)


@pytest.mark.parametrize("name", SERVED)
def test_vllm_serves_what_was_made(
    engine_python: Path, made: tuple[Path, Answers], served: Answers, expected: dict[str, list[float]], name: str
) -> None:
    """It loads every tensor into its place: the text is as likely as transformers says."""
    answer = served[name]
    assert "error" not in answer, answer
    assert answer["text"]
    differences = [abs(ours - theirs) for ours, theirs in zip(answer["logprobs"], expected[name], strict=True)]
    assert sum(differences) / len(differences) < 0.1, (answer["logprobs"], expected[name])
