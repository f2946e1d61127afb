"""`make demo`: the main job of bitmill, end to end, on this machine, by the commands that a person would type.

A checkpoint becomes an artifact by RPC, the artifact is loaded by its URI and answers a streamed Chat, and a table
compares it with its source. Exits 0 only if the artifact really answered; the servers are gone afterwards.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

import local_servers
from bitmill.artifact.v1 import artifact_pb2
from bitmill.client import InferenceClient, QuantizerClient

QUESTION = "What is the capital of France?"
# 576, the width of the example model, is no multiple of the default 128; of 32 and 64, 32 keeps a small model sane.
RECIPES = {
    "W4A16": ["--scheme", "W4A16", "--group-size", "32"],
    "W8A8_INT8": ["--scheme", "W8A8_INT8"],
}
CALIBRATION = ["--num-samples", "32", "--max-sequence-length", "512"]
SAMPLING = ["--temperature", "0", "--max-tokens", "64"]
# Without compilation, which takes longer than it saves on a model of this size.
ENGINE_OPTIONS = ["--enforce-eager"]
STREAMS = 8
TOKENS_PER_STREAM = 64

console = Console()


def main() -> int:
    """Runs the demo and returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=RECIPES, default="W4A16")
    parser.add_argument("--checkpoint", type=Path, required=True)
    arguments = parser.parse_args()
    # So that the servers are taken down then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checkpoint: Path = arguments.checkpoint.resolve()
    build = local_servers.ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=build) as scratch:
        return _demo(checkpoint, arguments.scheme, Path(scratch), build / "demo-logs")


def _demo(checkpoint: Path, scheme: str, scratch: Path, logs: Path) -> int:
    artifact_root = scratch / "store"
    artifact_root.mkdir()
    name = f"{checkpoint.name}-{scheme.lower().replace('_', '-')}"
    with local_servers.quantizer(
        source_root=checkpoint.parent,
        artifact_root=artifact_root,
        work_dir=scratch / "work",
        log_path=logs / "quantizer.log",
    ) as quantizer_address:
        _bitmill("--quantizer", quantizer_address, "quantize", str(checkpoint), name, *RECIPES[scheme], *CALIBRATION)
        with QuantizerClient(quantizer_address) as quantizer:
            (listed,) = quantizer.artifacts(name=name)
            artifact = quantizer.artifact(listed.uri)
    with local_servers.inference(
        model_roots=[checkpoint.parent, artifact_root], cache_dir=scratch / "cache", log_path=logs / "inference.log"
    ) as inference_address:
        _bitmill("--inference", inference_address, "models", "load", artifact.uri, *ENGINE_OPTIONS)
        answer = _bitmill("--inference", inference_address, "chat", QUESTION, *SAMPLING)
        with InferenceClient(inference_address) as inference:
            artifact_speed = _tokens_per_second(inference, name)
            inference.unload_model(name)
            console.print("loading the source checkpoint, to compare", style="dim")
            source = inference.load_model(checkpoint.as_uri(), enforce_eager=True)
            source_speed = _tokens_per_second(inference, source.name)
    console.print(_comparison(artifact, source_speed, artifact_speed))
    loss = artifact.evaluation
    console.print(f"mean KL divergence {loss.mean_kl_divergence:.4f} nats over {loss.num_tokens} held-out tokens")
    if not answer.strip():
        console.print("the artifact answered nothing", style="bold red")
        return 1
    return 0


def _bitmill(*arguments: str) -> str:
    """Runs one `bitmill` command on this terminal and returns what it printed."""
    console.print(f"\n$ bitmill {shlex.join(arguments)}", style="bold", soft_wrap=True, highlight=False)
    command = [str(Path(sys.executable).with_name("bitmill")), *arguments]
    if arguments[2] != "chat":
        subprocess.run(command, check=True)
        return ""
    # The answer is wanted twice: on the terminal while it streams, and here to judge.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = bytearray()
        while piece := process.stdout.read1():
            answer += piece
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return answer.decode()


def _tokens_per_second(inference: InferenceClient, model: str) -> float:
    """Returns output tokens per second of STREAMS concurrent streams, after one stream that warms the model up."""

    def stream(_: int) -> int:
        chunks = inference.generate(
            "The history of computing began", model=model, max_tokens=TOKENS_PER_STREAM, ignore_eos=True, temperature=0
        )
        return sum(len(chunk.token_ids) for chunk in chunks)

    stream(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        start = time.monotonic()
        tokens = sum(pool.map(stream, range(STREAMS)))
        return tokens / (time.monotonic() - start)


def _comparison(artifact: artifact_pb2.Artifact, source_speed: float, artifact_speed: float) -> Table:
    evaluation = artifact.evaluation
    table = Table("", "source", "artifact", "ratio", title=artifact.name)

    def row(label: str, before: float, after: float, form: str) -> None:
        table.add_row(label, format(before, form), format(after, form), f"{after / before:.2f}")

    row("bytes", artifact.source_size_bytes, artifact.size_bytes, ",d")
    row("perplexity (held out)", evaluation.source_perplexity, evaluation.artifact_perplexity, ".2f")
    row(f"output tok/s, {STREAMS} streams", source_speed, artifact_speed, ".1f")
    return table


if __name__ == "__main__":
    sys.exit(main())
