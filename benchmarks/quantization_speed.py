"""Seconds a layer of GPTQ W4A16: bitmill's engine against plain llm-compressor, in one run on this host's device.

    .venv/bin/python benchmarks/quantization_speed.py --tokenizer DIR [--layers 32] [--recovery CHECKPOINT_DIR]

The model is a Llama of 8B's shape with random weights, 512 samples of 2048 tokens. The plain side quantizes only the
first `--plain-layers` layers of the same shape: a layer costs the same wherever it stands. `--recovery` quantizes a
real checkpoint with both and evaluates both artifacts against it with the engine's own evaluation. Writes
benchmarks/results/quantization-speed-DEVICE.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
ENGINE = REPOSITORY / "services/quantizer/engines/llmcompressor"
RECIPE = {
    "scheme": "W4A16",
    "symmetric": True,
    "ignore": ["lm_head"],
    "dampening_frac": 0.01,
    "seed": 0,
}
MAKE_MODEL = """
import sys, torch, platform
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
directory, tokenizer, layers, shape = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
sizes = {"8b": (4096, 14336, 32, 8), "tiny": (256, 768, 4, 2)}[shape]
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=sizes[0], intermediate_size=sizes[1], num_hidden_layers=layers,
    num_attention_heads=sizes[2], num_key_value_heads=sizes[3], head_dim=sizes[0] // sizes[2],
    max_position_embeddings=8192,
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = LlamaForCausalLM(config)
model.save_pretrained(directory)
tokenizer.save_pretrained(directory)
"""


def main() -> None:
    """Measures, writes the result and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", default=str(ENGINE / ".venv/bin/python"))
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shape", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--plain-layers", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=512)
    parser.add_argument("--max-sequence-length", type=int, default=2048)
    parser.add_argument("--recovery", default="")
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(arguments, Path(scratch))
        result = {"about": bench.about()}
        target = arguments.output_dir / f"quantization-speed-{result['about']['device_kind']}.json"
        parts = [bench.speed, bench.recovery] if arguments.recovery else [bench.speed]
        for part in parts[::-1]:
            result |= part()
            target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(target.read_text())


class Bench:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments = arguments
        self._scratch = scratch

    def speed(self) -> dict[str, Any]:
        """Both sides' seconds a layer on random weights."""
        arguments = self._arguments
        samples = {"num_samples": arguments.num_samples, "max_sequence_length": arguments.max_sequence_length}
        model = self._model("model", arguments.layers)
        ours, seconds = self._quantize(model, samples)
        layer_s = _layer_seconds(ours)
        plain = self._plain(self._model("plain-model", arguments.plain_layers), samples)
        return {
            "layers": arguments.layers,
            **samples,
            "bitmill_s": round(seconds, 1),
            "bitmill_quantize_s": round(_span(ours), 1),
            "bitmill_layer_s": round(statistics.median(layer_s), 2),
            "bitmill_peak_device_memory_gib": _gib(ours[-1][1].get("peak_device_memory_bytes", 0)),
            "plain_layer_s": round(statistics.median(plain), 2),
            "ratio": round(statistics.median(plain) / statistics.median(layer_s), 2),
        }

    def _model(self, name: str, layers: int) -> Path:
        directory = self._scratch / name
        script = self._scratch / "make_model.py"
        script.write_text(MAKE_MODEL, encoding="utf-8")
        self._python(script, directory, self._arguments.tokenizer, layers, self._arguments.shape)
        return directory

    def _quantize(
        self, model: Path, samples: dict[str, int], **recipe: int
    ) -> tuple[list[tuple[float, dict[str, Any]]], float]:
        """The engine's events with the times at which they came, and the seconds of the whole process."""
        request = self._request(
            "quantize", source_dir=str(model), output_dir=f"{model}-bitmill", calibration=samples, **recipe
        )
        return self._engine(request)

    def _plain(self, model: Path, samples: dict[str, int], **recipe: int) -> list[float]:
        request = self._request(
            "quantize", source_dir=str(model), output_dir=f"{model}-plain", calibration=samples, **recipe
        )
        output = self._python(REPOSITORY / "benchmarks/plain_llmcompressor.py", request)
        return list(json.loads(output.splitlines()[-1])["layer_s"])

    def recovery(self) -> dict[str, Any]:
        """What both sides' artifacts of a real checkpoint lost."""
        checkpoint = Path(self._arguments.recovery)
        model = self._scratch / "recovery"
        model.symlink_to(checkpoint.resolve())
        samples = {"num_samples": 128, "max_sequence_length": 2048}
        # Some small models have sizes that 128 does not divide.
        self._quantize(model, samples, group_size=64)
        self._plain(model, samples, group_size=64)
        measured = {}
        for side in ("bitmill", "plain"):
            request = self._request(
                "evaluate",
                source_dir=str(model),
                model_dir=f"{model}-{side}",
                num_tokens=32768,
                window=2048,
            )
            events, _ = self._engine(request)
            measured[side] = {key: events[-1][1][key] for key in ("artifact_perplexity", "mean_kl_divergence")}
        return {"recovery": {"checkpoint": checkpoint.name, "group_size": 64, **samples, **measured}}

    def _request(
        self, operation: str, calibration: dict[str, int] | None = None, group_size: int = 128, **fields: Any
    ) -> Path:
        request = {"protocol_version": 2, "operation": operation, **fields}
        if calibration:
            request |= {"recipe": RECIPE | {"group_size": group_size}, "calibration": {"path": None, **calibration}}
        path = self._scratch / f"{operation}.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        return path

    def _engine(self, request: Path) -> tuple[list[tuple[float, dict[str, Any]]], float]:
        start = time.perf_counter()
        command = [self._arguments.engine_python, "-m", "bitmill_engine_llmcompressor", str(request)]
        events = []
        with (self._scratch / "engine.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert process.stdout is not None
            events.extend((time.perf_counter() - start, json.loads(line)) for line in process.stdout)
        if process.wait() != 0:
            raise RuntimeError(f"{events[-1:]} {(self._scratch / 'engine.log').read_text()[-3000:]}")
        return events, time.perf_counter() - start

    def _python(self, *arguments: object) -> str:
        command = [self._arguments.engine_python, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-3000:])
        return done.stdout

    def about(self) -> dict[str, str]:
        """The device and the versions."""
        script = self._scratch / "about.py"
        script.write_text(
            "import json, torch\nfrom importlib.metadata import version\n"
            "cuda = torch.cuda.is_available()\n"
            "print(json.dumps({'device_kind': 'cuda' if cuda else 'cpu', "
            "'device': torch.cuda.get_device_name() if cuda else 'cpu', "
            "**{name: version(name) for name in ('torch', 'llmcompressor', 'transformers', 'compressed-tensors')}}))\n",
            encoding="utf-8",
        )
        return dict(json.loads(self._python(script).splitlines()[-1]))


def _layers(events: list[tuple[float, dict[str, Any]]]) -> list[float]:
    return [moment for moment, event in events if event.get("unit") == "layers"]


def _layer_seconds(events: list[tuple[float, dict[str, Any]]]) -> list[float]:
    """The seconds of each layer but the first, which compiles kernels."""
    moments = _layers(events)[1:]
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def _span(events: list[tuple[float, dict[str, Any]]]) -> float:
    moments = _layers(events)
    return moments[-1] - moments[0]


def _gib(count: int) -> float:
    return round(count / 2**30, 1)


if __name__ == "__main__":
    main()
