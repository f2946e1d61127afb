"""Checkpoints as they come: every architecture, layout and format that the engine takes, quantized and then served."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bitmill_common.checkpoint import inspect_source
from bitmill_common.object_store import ObjectStore
from bitmill_common.recipes import Recipe, Scheme
from bitmill_common.stores import Stores
from bitmill_quantizer.plans.layers import ARCHITECTURES, linear_layers, row_name
from bitmill_quantizer.plans.treatments import treat
from support.llmcompressor_engine import quantize_request

REPOSITORY = Path(__file__).parents[2]
SUPPORT = REPOSITORY / "tests/support"
DEADLINE_S = 280
PROMPT = "The quick brown fox jumps over the lazy dog, and the with statement is used to wrap the execution of a block."

MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
DENSE = sorted(ARCHITECTURES.difference(MIXTURES))
STACKED = "Qwen3MoeForCausalLM-stacked"
ODD = "LlamaForCausalLM-odd"
LINKED = "LlamaForCausalLM-linked"
AMBIGUOUS = "ambiguous"
UNFIT = "unfit"
# Calibrated ones; the rest are rounded to nearest, which reads no data.
GPTQ = ("LlamaForCausalLM", LINKED, "Qwen2ForCausalLM", *MIXTURES, STACKED)
# vLLM's kernels for quantized experts need AMX on a CPU; the rest of a mixture it serves anywhere.
EXPERTS = r"re:.*\.experts\..*"
PARTS = tuple(f"{name}-experts-left" for name in MIXTURES)
# Checkpoints and the type that their weights have in a GGUF file; transformers makes the tokenizers of the first three
# of it, the others have theirs beside it.
GGUF = {"LlamaForCausalLM": "Q8_0", "Qwen2ForCausalLM": "BF16", "Qwen3MoeForCausalLM": "F32"}
GGUF_AND_TOKENIZER = {"Gemma3ForCausalLM": "F16", "Phi3ForCausalLM": "Q4_0"}
FROM_GGUF = tuple(f"{name}.gguf" for name in GGUF | GGUF_AND_TOKENIZER)
SERVED = (*DENSE, ODD, *PARTS, "LlamaForCausalLM.gguf")
COMPANIONS = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

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
    for name, type_name in (GGUF | GGUF_AND_TOKENIZER).items():
        source = file = root / f"{name}.gguf"
        if name in GGUF_AND_TOKENIZER:
            file = source / "model.gguf"
            source.mkdir()
            for companion in COMPANIONS:
                shutil.copyfile(tiny_families / name / companion, source / companion)
        found[source.name] = source
        arguments += [tiny_families / name, type_name, file]
    found[UNFIT] = root / UNFIT
    found[UNFIT].mkdir()
    arguments += [
        with_another_config(tiny_families / "LlamaForCausalLM", root / "llama"),
        "F16",
        found[UNFIT] / "x.gguf",
    ]
    run_script(engine_python, "make_tiny_gguf.py", *arguments)
    found[AMBIGUOUS] = root
    found[LINKED] = link_as_the_hub_does(tiny_families / "LlamaForCausalLM", root / "models--org--llama")
    return found


def with_another_config(checkpoint: Path, directory: Path) -> Path:
    """Copies a checkpoint, and makes its config.json ask for wider layers than there are."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    return directory


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


@pytest.fixture(scope="module")
def expected(engine_python: Path, sources: dict[str, Path], made: tuple[Path, Answers]) -> dict[str, list[float]]:
    """What transformers says of a text's tokens, by artifact, and by source under "source of"."""
    directory, _ = made
    models = {name: directory / name for name in (*SERVED, *MIXTURES, *FROM_GGUF)}
    for name in FROM_GGUF:
        models |= {f"source of {name}": sources[name]}
    for name in (*MIXTURES, *(name.removesuffix(".gguf") for name in FROM_GGUF)):
        models |= {f"source of {name}": sources[name]}
    path = directory / "expected.json"
    path.write_text(json.dumps(list(map(str, models.values()))))
    return dict(zip(models, json.loads(run_script(engine_python, "plain_logprobs.py", path, PROMPT)), strict=True))


def distance(ours: list[float], theirs: list[float]) -> float:
    """Mean difference of log probabilities, relative to their range: 0.3 for what has nothing in common."""
    difference = sum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / len(theirs)
    return difference / (max(theirs) - min(theirs))


def store_of(source: Path) -> tuple[ObjectStore, str]:
    directory = source if source.is_dir() else source.parent
    store = Stores([directory.parents[1].as_uri()]).open(directory.as_uri(), "uri")
    return store, "" if source.is_dir() else source.name


def tensor_names(directory: Path) -> set[str]:
    """The names of a checkpoint's tensors, without what quantization makes of a weight."""
    checkpoint = inspect_source(*store_of(directory))
    quantized = ("_packed", "_scale", "_shape")
    return {name.removesuffix(next((s for s in quantized if name.endswith(s)), "")) for name in checkpoint.tensors}


def test_every_architecture_is_there(sources: dict[str, Path]) -> None:
    """A checkpoint of each that the server accepts."""
    assert set(sources) >= ARCHITECTURES


@pytest.mark.parametrize("name", [*sorted(ARCHITECTURES), ODD, STACKED, LINKED, *PARTS, *FROM_GGUF])
def test_the_plan_is_what_the_engine_does(sources: dict[str, Path], made: tuple[Path, Answers], name: str) -> None:
    """The server finds the same layers by their tensors' names, and leaves the same ones out."""
    answer = made[1][name]
    assert "reason" not in answer, answer
    layers = linear_layers(inspect_source(*store_of(sources[source_of(name)])))
    recipe = Recipe(Scheme.W4A16, 32, ignore=(EXPERTS,) if name in PARTS else ("lm_head",))
    treated = treat(layers, recipe)
    assert not treated.problems
    rows = {row["name"]: row for row in answer["modules"]}
    assert set(rows) == {row_name(layer) for layer in layers}
    quantized = {row for row, fields in rows.items() if fields["scheme"] != "UNQUANTIZED"}
    assert quantized == {row_name(layer) for layer in treated.quantized}
    assert {row for row, fields in rows.items() if fields["remark"]} == {row_name(layer) for layer in treated.skipped}
    assert answer["num_quantized_modules"] == len(treated.quantized)
    assert bool(treated.skipped) == (name == ODD)


@pytest.mark.parametrize("name", SERVED)
def test_vllm_serves_what_was_made(served: Answers, expected: dict[str, list[float]], name: str) -> None:
    """It loads every tensor into its place: a text is as likely as transformers says."""
    answer = served[name]
    assert "error" not in answer, answer
    assert answer["text"]
    assert distance(answer["logprobs"], expected[name]) < 0.02


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_with_quantized_experts_still_says_what_its_source_says(
    expected: dict[str, list[float]], name: str
) -> None:
    """As far as four bits of random weights can."""
    assert distance(expected[name], expected[f"source of {name}"]) < 0.2


@pytest.mark.parametrize(("name", "most"), [(name, 0.2 if "Phi3" in name else 0.02) for name in FROM_GGUF])
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(
    expected: dict[str, list[float]], name: str, most: float
) -> None:
    """Dequantized; Phi 3's has four bits."""
    original = name.removesuffix(".gguf")
    assert distance(expected[f"source of {name}"], expected[f"source of {original}"]) < most
    assert distance(expected[name], expected[f"source of {name}"]) < 0.2


@pytest.mark.parametrize("name", [*sorted(ARCHITECTURES), ODD])
def test_tensors_keep_the_names_of_the_sources_files(
    sources: dict[str, Path], made: tuple[Path, Answers], name: str
) -> None:
    """They are those that vLLM reads; nothing is lost, a bias, a router or a tied head no more than a weight."""
    assert tensor_names(made[0] / name) == tensor_names(sources[name])


@pytest.mark.parametrize("name", [*sorted(ARCHITECTURES), ODD, *GGUF_AND_TOKENIZER])
def test_companions_stay_byte_for_byte(sources: dict[str, Path], made: tuple[Path, Answers], name: str) -> None:
    """Several ids that end a text among them; what is no part of a checkpoint is left behind."""
    artifact = made[0] / name
    for companion in COMPANIONS:
        assert (artifact / companion).read_bytes() == (sources[name] / companion).read_bytes()
    assert {path.name for path in artifact.iterdir()} == {*COMPANIONS, "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("LlamaForCausalLM", "BF16"),
        ("MistralForCausalLM", "F16"),
        ("Qwen3ForCausalLM", "BF16"),
        ("Gemma3ForCausalLM.gguf", "F16"),
        ("LlamaForCausalLM.gguf", "BF16"),
        ("Qwen3MoeForCausalLM.gguf", "BF16"),
    ],
)
def test_what_is_not_quantized_is_stored_in_16_bits(made: tuple[Path, Answers], name: str, dtype: str) -> None:
    """float32 becomes bfloat16, as does what a GGUF file holds in other types than float16."""
    checkpoint = inspect_source(*store_of(made[0] / name))
    floats = {tensor.dtype for tensor in checkpoint.tensors.values()} - {"I32", "I64"}
    assert floats == {dtype}
    assert checkpoint.config["dtype"] == {"BF16": "bfloat16", "F16": "float16"}[dtype]


@pytest.mark.parametrize(("name", "same"), [("LlamaForCausalLM", LINKED), ("Qwen3MoeForCausalLM", STACKED)])
def test_the_layout_of_the_files_does_not_matter(made: tuple[Path, Answers], name: str, same: str) -> None:
    """Shards or links to blobs, each expert by itself or all in one tensor: the artifact has the same bytes."""
    directory, _ = made
    for file in ("config.json", "model.safetensors"):
        assert (directory / name / file).read_bytes() == (directory / same / file).read_bytes()


def test_experts_that_no_token_reached_are_listed(made: tuple[Path, Answers]) -> None:
    """The last expert of Mixtral's first layer is never chosen; the others' routers spread their tokens."""
    uncalibrated = {name: made[1][name]["calibration"]["uncalibrated_modules"] for name in MIXTURES}
    assert uncalibrated["MixtralForCausalLM"] == ["model.layers.0.mlp.experts.4"]
    assert not uncalibrated["Qwen2MoeForCausalLM"]


def test_a_gguf_file_whose_tensors_do_not_fit_its_metadata_is_refused(made: tuple[Path, Answers]) -> None:
    """transformers would take it without a word."""
    answer = made[1][UNFIT]
    assert answer["reason"] == "CHECKPOINT_INVALID"
    assert ".mlp." in answer["metadata"]["tensor"]


def test_several_gguf_files_need_a_choice(made: tuple[Path, Answers]) -> None:
    answer = made[1][AMBIGUOUS]
    assert answer["reason"] == "CHECKPOINT_AMBIGUOUS"
    assert "LlamaForCausalLM.gguf" in answer["metadata"]["files"]
