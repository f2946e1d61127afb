"""ADAPTIVE against a uniform artifact of equal size: held-out divergence of SmolLM2, by the engine's own evaluation.

    .venv/bin/python benchmarks/adaptive.py --checkpoint build/checkpoints/smollm2-135m-instruct

The uniform artifact is W4A16 with the group size given; ADAPTIVE may not exceed the size of its weight files. Both are
calibrated with the same samples. Writes benchmarks/results/adaptive.json: sizes, divergences, perplexities and what was
chosen for how many weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
ENGINE_PYTHON = REPOSITORY / "services/quantizer/engines/llmcompressor/.venv/bin/python"
CANDIDATES = [
    *({"scheme": "W4A16", "algorithm": "GPTQ", "group_size": size, "symmetric": True} for size in (-1, 128, 64, 32)),
    {"scheme": "W8A16", "algorithm": "GPTQ", "group_size": -1, "symmetric": True},
]


def main() -> None:
    """Measures, writes the result and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--engine-python", type=Path, default=ENGINE_PYTHON)
    parser.add_argument("--group-size", type=int, default=64, help="of the uniform artifact")
    parser.add_argument("--num-samples", type=int, default=96, help="to calibrate with")
    parser.add_argument("--max-sequence-length", type=int, default=128)
    parser.add_argument("--num-measured", type=int, default=8, help="samples that ADAPTIVE measures on")
    parser.add_argument("--num-tokens", type=int, default=8192, help="held-out tokens to predict")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = Bench(arguments, Path(scratch)).run()
    target = arguments.output_dir / "adaptive.json"
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(target.read_text())


class Bench:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments = arguments
        self._scratch = scratch

    def run(self) -> dict[str, Any]:
        """Makes and measures both artifacts."""
        group_size = self._arguments.group_size
        uniform, versions, _ = self._artifact(
            "uniform", {"scheme": "W4A16", "algorithm": "GPTQ", "group_size": group_size, "adaptive": None}
        )
        search = {
            "candidates": CANDIDATES,
            "max_size_bytes": uniform["weight_bytes"],
            "max_perplexity_ratio": None,
            "num_samples": self._arguments.num_measured,
        }
        adaptive, _, sensitivities = self._artifact(
            "adaptive", {"scheme": "ADAPTIVE", "algorithm": "NONE", "group_size": 0, "adaptive": search}
        )
        chosen = Counter[str]()
        for row in (row for row in sensitivities if row["chosen"]):
            chosen[f"{row['scheme']}/{row['group_size']}"] += len(row["modules"])
        return {
            "kl_divergence_ratio": adaptive["mean_kl_divergence"] / uniform["mean_kl_divergence"],
            "uniform": {"scheme": f"W4A16/{group_size}", **uniform},
            "adaptive": {"layers_by_candidate": dict(sorted(chosen.items())), **adaptive},
            "checkpoint": self._arguments.checkpoint.name,
            "versions": versions,
            "command": " ".join(sys.argv),
        }

    def _artifact(
        self, name: str, recipe: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str], list[dict[str, Any]]]:
        """Makes an artifact and returns what it is like, the engine's versions and its sensitivities."""
        source, model = self._arguments.checkpoint.absolute(), self._scratch / name
        made, quantize_s = self._engine(
            {
                "operation": "quantize",
                "source_dir": str(source),
                "output_dir": str(model),
                "recipe": {
                    "symmetric": True,
                    "activation_order": "STATIC",
                    "ignore": ["lm_head"],
                    "rules": [],
                    "kv_cache": None,
                    "smoothing_strength": 0,
                    "dampening_frac": 0.01,
                    "seed": 0,
                    **recipe,
                },
                "calibration": {
                    "path": None,
                    "packing": "CONCATENATE",
                    "num_samples": self._arguments.num_samples,
                    "max_sequence_length": self._arguments.max_sequence_length,
                },
            }
        )
        measured, _ = self._engine(
            {
                "operation": "evaluate",
                "source_dir": str(source),
                "model_dir": str(model),
                "num_tokens": self._arguments.num_tokens,
                "window": self._arguments.window,
            }
        )
        numbers = ("mean_kl_divergence", "p99_kl_divergence", "top1_agreement", "artifact_perplexity")
        about = {
            "weight_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
            **{number: measured[number] for number in (*numbers, "source_perplexity", "num_tokens")},
            "quantize_s": round(quantize_s, 1),
        }
        return about, made["versions"], made["sensitivities"]

    def _engine(self, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Runs the engine and returns its result and its seconds from start to end."""
        path = self._scratch / "request.json"
        path.write_text(json.dumps({"protocol_version": 2, **request}), encoding="utf-8")
        start = time.monotonic()
        process = subprocess.run(
            [self._arguments.engine_python, "-m", "bitmill_engine_llmcompressor", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - start
        lines = process.stdout.splitlines()
        last: dict[str, Any] = json.loads(lines[-1]) if lines else {"event": "nothing"}
        if last["event"] != "result":
            sys.exit(f"{request['operation']}: {last}\n{process.stderr[-4000:]}")
        return last, seconds


if __name__ == "__main__":
    main()
