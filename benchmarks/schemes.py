"""The shipped recipes on this host's device: made by the engine, measured, loaded by the inference server, streamed.

    PYTHONPATH=examples .venv/bin/python benchmarks/schemes.py --checkpoint DIR [--recipes NAME...] [--group-size 32]

Writes benchmarks/results/schemes-DEVICE.json, a list of rows with `recipe`, `scheme`, `device`, `quantize_s`,
`evaluate_s` (both beside the other recipes, --jobs at once), `bytes`, `source_bytes`, the losses, `tokens_per_s` of 64
streams, and the versions. A recipe that the device has no kernel for has a `refusal` instead of a speed, one that the
engine does not make of this checkpoint a `failure`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import local_servers
from bitmill import InferenceClient, errors, recipes
from bitmill.artifact.v1.recipe_pb2 import Scheme
from bitmill.keywords import EngineKeywords
from bitmill_common.manifest_recipe import recipe_to_json
from bitmill_common.recipes import Calibration, Recipe
from bitmill_quantizer.processes import engine_messages
from bitmill_quantizer.recipes.recipe_rules import complete_recipe
from bitmill_quantizer.servicers.convert_recipe import recipe_draft

REPOSITORY = Path(__file__).parents[1]

CALIBRATION = Calibration(num_samples=64, max_sequence_length=512)
EVALUATION_TOKENS = 4096
STREAMS = 64
TOKENS_PER_STREAM = 128
# Without compilation, which takes longer than the measurement.
OPTIONS: EngineKeywords = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 30}


def main() -> None:
    """Measures, writes the rows and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    services = REPOSITORY / "services"
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", choices=recipes.names(), default=recipes.names())
    parser.add_argument("--group-size", type=int, help="of W4A16, where 128 does not divide the checkpoint's sizes")
    parser.add_argument("--jobs", type=int, default=1, help="engines that run at once")
    parser.add_argument("--engine-python", default=str(services / "quantizer/engines/llmcompressor/.venv/bin/python"))
    parser.add_argument("--inference-python", default=str(services / "inference/.venv/bin/python"))
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "benchmarks/results")
    arguments = parser.parse_args()
    about = describe(arguments)
    target = arguments.output_dir / f"schemes-{'cpu' if about['device'] == 'cpu' else 'cuda'}.json"

    def keep(rows: list[dict[str, Any]]) -> None:
        target.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as scratch:
        run(arguments, Path(scratch), about, keep)
    print(target.read_text())


def run(
    arguments: argparse.Namespace, scratch: Path, about: dict[str, Any], keep: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Makes, measures and serves each recipe; `keep` gets the rows as soon as there is more in them."""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(lambda name: made(arguments, scratch, name) | about, arguments.recipes))
    keep(rows)
    environment = {
        "BITMILL_INFERENCE_ADDRESS": "127.0.0.1:0",
        "BITMILL_INFERENCE_MODEL_ROOTS": scratch.as_uri(),
        "BITMILL_INFERENCE_CACHE_DIR": str(scratch / "cache"),
    }
    log = arguments.output_dir / "schemes-inference.log"
    with (
        local_servers.server("bitmill_inference", Path(arguments.inference_python), environment, log) as address,
        InferenceClient(address) as inference,
    ):
        for row in rows:
            if "failure" not in row:
                row.update(served(inference, scratch / row["recipe"]))
                keep(rows)
    log.unlink()


def made(arguments: argparse.Namespace, scratch: Path, name: str) -> dict[str, Any]:
    """Makes and measures the artifact of one recipe; what the engine says, when it refuses."""
    recipe = complete(name, arguments.group_size)
    model_dir = scratch / name
    row: dict[str, Any] = {"recipe": name, "scheme": recipe.scheme.value}
    quantize = {
        "operation": "quantize",
        "source_dir": str(arguments.checkpoint),
        "output_dir": str(model_dir),
        "recipe": recipe_to_json(recipe),
        "calibration": engine_messages.calibration_json(CALIBRATION, None),
    }
    evaluate = {
        "operation": "evaluate",
        "source_dir": str(arguments.checkpoint),
        "model_dir": str(model_dir),
        "num_tokens": EVALUATION_TOKENS,
        "window": CALIBRATION.max_sequence_length,
    }
    try:
        result, quantize_s = engine(arguments, scratch, name, quantize)
        measured, evaluate_s = engine(arguments, scratch, name, evaluate)
    except EngineFailedError as error:
        return row | {"failure": str(error)}
    return row | {
        "quantize_s": round(quantize_s, 1),
        "evaluate_s": round(evaluate_s, 1),
        "source_bytes": size(arguments.checkpoint),
        "bytes": size(model_dir),
        **{key: measured[key] for key in ("mean_kl_divergence", "p99_kl_divergence", "top1_agreement")},
        "source_perplexity": measured["source_perplexity"],
        "artifact_perplexity": measured["artifact_perplexity"],
        "num_quantized_modules": result["num_quantized_modules"],
        "engine_versions": result["versions"],
    }


def complete(name: str, group_size: int | None) -> Recipe:
    """Returns a shipped recipe with every default filled in, as the server does."""
    message = recipes.load(name)
    if group_size is not None and message.scheme == Scheme.SCHEME_W4A16:
        message.group_size = group_size
    recipe, violations = complete_recipe(recipe_draft(message), CALIBRATION.num_samples)
    if recipe is None:
        sys.exit(f"{name}: {violations}")
    return recipe


class EngineFailedError(Exception):
    """The engine's own reason and words."""


def engine(
    arguments: argparse.Namespace, scratch: Path, name: str, request: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Runs the engine and returns its result and its seconds from start to end."""
    path = scratch / f"{name}.{request['operation']}.json"
    path.write_text(json.dumps({"protocol_version": 2, **request}), encoding="utf-8")
    start = time.monotonic()
    process = subprocess.run(
        [arguments.engine_python, "-m", "bitmill_engine_llmcompressor", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=scratch,
    )
    seconds = time.monotonic() - start
    lines = process.stdout.splitlines()
    last = json.loads(lines[-1]) if lines else {}
    if last.get("event") != "result":
        print(f"{name}, {request['operation']}:\n{process.stderr[-3000:]}", file=sys.stderr)
        raise EngineFailedError(f"{last.get('reason', 'crash')}: {last.get('message', process.stderr[-500:])}")
    return last, seconds


def served(inference: InferenceClient, model_dir: Path) -> dict[str, Any]:
    """Loads a model directory and measures it; what refuses it, when the device cannot serve it."""
    name = model_dir.name.lower().replace("_", "-")
    try:
        model = inference.load_model(model_dir.as_uri(), name=name, **OPTIONS)
    except errors.BitmillRpcError as error:
        return {"refusal": str(error)}

    def stream(number: int) -> int:
        prompt = f"Stream {number} tells a story about"
        chunks = inference.generate(prompt, model=name, max_tokens=TOKENS_PER_STREAM, ignore_eos=True, temperature=0)
        return sum(len(chunk.token_ids) for chunk in chunks)

    stream(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        start = time.monotonic()
        tokens = sum(pool.map(stream, range(STREAMS)))
        speed = tokens / (time.monotonic() - start)
    inference.unload_model(name)
    return {"quantization": model.quantization, "streams": STREAMS, "tokens_per_s": round(speed, 1)}


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the device and the versions of what serves."""
    code = (
        "import json, torch; from importlib.metadata import version; cuda = torch.cuda.is_available();"
        "print(json.dumps({'device': torch.cuda.get_device_name() if cuda else 'cpu',"
        " 'torch': version('torch'), 'vllm': __import__('vllm').__version__}))"
    )
    process = subprocess.run(
        [arguments.inference_python, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    about: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return about | {"checkpoint": arguments.checkpoint.name, "command": " ".join(sys.argv)}


def size(directory: Path) -> int:
    """Returns the bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
