"""What the admission window does: jitter between tokens and throughput, off and at several sizes, in one run.

    services/inference/.venv/bin/python benchmarks/admission_window.py [--model DIR]

The real server with the streaming benchmark's model loaded once for each window, one client process on the same host.
Calls with prompts of some hundred tokens come in an open loop at `--load` times the capacity, which a closed loop of
`--seqs` callers without a window measures first. A prompt that starts takes a step that the running streams wait for;
the window lets several start in one, and pays with the time to the first token. The windows take turns, with the same
arrivals in each turn, and a closed loop of `--seqs` callers shows the throughput of each.

Jitter is the 99th percentile of the times between chunks less their median. Writes a list of rows to
benchmarks/results/admission_window.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import uvloop
from open_loop import Call, Caller, closed_loop, open_loop, summary
from streaming import REPOSITORY, default_model, versions
from streaming_sides import bitmill_server, load_model

from bitmill.inference.v1 import inference_service_pb2_grpc

RESULTS = REPOSITORY / "benchmarks/results/admission_window.json"
COLUMNS = ("closed_tokens_per_s", "itl_ms_p50", "itl_ms_p99", "itl_jitter_ms", "ttft_ms_p50", "ttft_ms_p99")


@dataclass(frozen=True)
class Window:
    """The options of one side; a size of 1 is no window."""

    min_batch_size: int
    batch_timeout: timedelta = timedelta(0)

    @property
    def name(self) -> str:
        """The model's name and the row's."""
        if self.min_batch_size == 1:
            return "off"
        return f"{self.min_batch_size}-calls-{round(self.batch_timeout.total_seconds() * 1000)}-ms"

    @property
    def options(self) -> dict[str, Any]:
        """As LoadModel takes them."""
        if self.min_batch_size == 1:
            return {}
        return {"min_batch_size": self.min_batch_size, "batch_timeout": self.batch_timeout}


@dataclass(frozen=True)
class Turn:
    """One turn: the calls of the open loop, in how many seconds they came, and the closed loop's throughput."""

    calls: list[Call]
    seconds: float
    closed_tokens_per_s: float


WINDOWS = (
    Window(1),
    Window(2, timedelta(milliseconds=50)),
    Window(4, timedelta(milliseconds=100)),
    Window(8, timedelta(milliseconds=250)),
)


async def measure(address: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every window's turns after a warm-up."""
    turns: dict[Window, list[Turn]] = {window: [] for window in WINDOWS}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        callers = {window: Caller(stub, window.name, arguments.tokens, arguments.words) for window in WINDOWS}
        for caller in callers.values():
            await closed_loop(caller, arguments.seqs, arguments.seconds / 4)
        full, took = await closed_loop(callers[WINDOWS[0]], arguments.seqs, arguments.seconds)
        per_s = arguments.load * len(full) / took
        for number in range(arguments.rounds):
            first = number % len(WINDOWS)
            for window in WINDOWS[first:] + WINDOWS[:first]:
                came, came_s = await open_loop(callers[window], per_s, arguments.seconds, seed=number)
                closed, closed_s = await closed_loop(callers[window], arguments.seqs, arguments.seconds / 2)
                turns[window].append(Turn(came, came_s, sum(call.tokens for call in closed) / closed_s))
    return [row(window, turns[window]) for window in WINDOWS]


def row(window: Window, turns: list[Turn]) -> dict[str, Any]:
    """One row of the results, printed."""
    values = {
        "window": window.name,
        "min_batch_size": window.min_batch_size,
        "batch_timeout_ms": window.batch_timeout.total_seconds() * 1000,
        **summary([call for turn in turns for call in turn.calls], sum(turn.seconds for turn in turns)),
        "closed_tokens_per_s": round(statistics.median(turn.closed_tokens_per_s for turn in turns), 1),
    }
    values["itl_jitter_ms"] = round(values["itl_ms_p99"] - values["itl_ms_p50"], 3)
    print(f"{window.name:>16} " + " ".join(f"{values[name]:>19.2f}" for name in COLUMNS), flush=True)
    return values


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint directory; the streaming benchmark's own by default")
    parser.add_argument("--seqs", type=int, default=32, help="max_num_seqs")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each call")
    parser.add_argument("--words", type=int, default=80, help="words of each prompt, of about four tokens")
    parser.add_argument("--load", type=float, default=0.6, help="calls that come, as a part of the capacity")
    parser.add_argument("--seconds", type=float, default=8, help="length of each turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = (arguments.model or default_model()).resolve()
    with bitmill_server(model.parent) as (_, address):
        for window in WINDOWS:
            options = {"max_num_seqs": arguments.seqs, "enable_prefix_caching": False, **window.options}
            load_model(address, model, window.name, **options)
        print(f"{'window':>16} " + " ".join(f"{name:>19}" for name in COLUMNS), flush=True)
        rows = uvloop.run(measure(address, arguments))
    about = versions() | {name: getattr(arguments, name) for name in ("seqs", "tokens", "words", "load", "rounds")}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        json.dumps([each | {"about": about | {"model": model.name}} for each in rows], indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
