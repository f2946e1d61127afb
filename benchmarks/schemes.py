"""Every scheme on this host's device: made by the engine, measured, loaded by the inference server, streamed.

    PYTHONPATH=examples .venv/bin/python benchmarks/schemes.py --checkpoint DIR

Writes benchmarks/results/schemes-DEVICE.json, a list of rows with `scheme`, `device`, `quantize_s`, `evaluate_s`,
`bytes`, `source_bytes`, `mean_kl_divergence`, `tokens_per_s` of 64 streams, and the versions. A scheme that the device
has no kernel for has a `refusal` instead of a speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import local_servers
from bitmill import InferenceClient, errors

REPOSITORY = Path(__file__).parents[1]

RECIPES: dict[str, dict[str, Any]] = {
    "W4A16": {"group_size": 32},
    "W8A16": {"group_size": 32},
    "W8A8_INT8": {"group_size": -1},
}
STREAMS = 64
TOKENS_PER_STREAM = 128


def main() -> None:
    """Measures, writes the rows and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    services = REPOSITORY / "services"
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--engine-python", default=str(services / "quantizer/engines/llmcompressor/.venv/bin/python"))
    parser.add_argument("--inference-python", default=str(services / "inference/.venv/bin/python"))
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(arguments, Path(scratch))
    name = "cuda" if rows[0]["device"] != "cpu" else "cpu"
    target = arguments.output_dir / f"schemes-{name}.json"
    target.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(target.read_text())


def run(arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Makes, measures and serves each scheme and returns a row for each."""
    rows = []
    about = describe(arguments)
    for scheme, recipe in RECIPES.items():
        request = {
            "source_dir": str(arguments.checkpoint),
            "recipe": {"scheme": scheme, "symmetric": True, "ignore": [], "dampening_frac": 0.01, "seed": 0, **recipe},
            "calibration": {"path": None, "num_samples": 32, "max_sequence_length": 512},
        }
        model_dir = str(scratch / scheme)
        made, quantize_s = engine(arguments, scratch, {**request, "operation": "quantize", "output_dir": model_dir})
        measured, evaluate_s = engine(
            arguments,
            scratch,
            {
                "operation": "evaluate",
                "source_dir": str(arguments.checkpoint),
                "model_dir": model_dir,
                "num_tokens": 4096,
                "window": 512,
            },
        )
        rows.append(
            {
                "scheme": scheme,
                "quantize_s": round(quantize_s, 1),
                "evaluate_s": round(evaluate_s, 1),
                "source_bytes": size(arguments.checkpoint),
                "bytes": size(Path(model_dir)),
                "mean_kl_divergence": measured["mean_kl_divergence"],
                "num_quantized_modules": made["num_quantized_modules"],
                "engine_versions": made["versions"],
                **about,
            }
        )
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
            row.update(served(inference, scratch / row["scheme"]))
    log.unlink()
    return rows


def engine(arguments: argparse.Namespace, scratch: Path, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Runs the engine and returns its result and its seconds from start to end."""
    path = scratch / "request.json"
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
    last = json.loads(lines[-1]) if lines else {"event": "nothing"}
    if last["event"] != "result":
        sys.exit(f"{request['operation']}: {last}\n{process.stderr[-4000:]}")
    return last, seconds


def served(inference: InferenceClient, model_dir: Path) -> dict[str, Any]:
    """Loads a model directory and measures it; what refuses it, when the device cannot serve it."""
    name = model_dir.name.lower().replace("_", "-")
    try:
        model = inference.load_model(model_dir.as_uri(), name=name)
    except errors.FailedPreconditionError as error:
        return {"refusal": f"{error.reason}: {error}"}

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
