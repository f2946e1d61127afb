"""Ten times more calls than the server can serve: what the accepted ones and the refused ones see, in one run.

    services/inference/.venv/bin/python benchmarks/overload.py [--model DIR]

The real server with the streaming benchmark's model, one client process on the same host. Capacity is what a closed
loop of `--seqs` callers gets: a full batch, and nobody waits. "uncongested" is an open loop at half of it, "overload"
one at ten times it.

A batch of 16 keeps what is measured apart from what a fuller batch costs: on two cores the step of a model this small
takes twice as long with 32 sequences in it as with 8, whatever the load.

The bounds: `max_num_queued_reqs` is `max_num_seqs`, so that whoever is let in starts at once. Each place beyond the
batch would let a call wait for up to one more call's length divided by the batch's size; a bound of twice the batch
lets the last one wait as long as it runs, which alone doubles the latency. Calls that are refused come back without a
retry; in production they wait for RetryInfo's delay or go to another replica.

Writes a list of rows to benchmarks/results/overload.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import grpc
import uvloop
from open_loop import Call, Caller, closed_loop, open_loop, summary
from streaming import REPOSITORY, default_model, versions
from streaming_clients import MODEL_NAME
from streaming_sides import bitmill_server, load_model

from bitmill.inference.v1 import inference_service_pb2_grpc

RESULTS = REPOSITORY / "benchmarks/results/overload.json"
UNCONGESTED = 0.5
OVERLOAD = 10
GOAL_P99_RATIO = 2
GOAL_REFUSAL_MS = 50
PROMPT_WORDS = 8
COLUMNS = ("offered_per_s", "accepted_per_s", "accepted_ms_p50", "accepted_ms_p99", "refusal_ms_p50", "refusal_ms_p99")


async def measure(address: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the three loads after a warm-up."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        caller = Caller(stub, MODEL_NAME, arguments.tokens, PROMPT_WORDS)
        await closed_loop(caller, arguments.seqs, arguments.seconds / 4)
        at_capacity, seconds = await closed_loop(caller, arguments.seqs, arguments.seconds)
        per_s = len(at_capacity) / seconds
        rows = [row("capacity", at_capacity, seconds)]
        for name, factor in (("uncongested", UNCONGESTED), ("overload", OVERLOAD)):
            rows.append(row(name, *await open_loop(caller, factor * per_s, arguments.seconds)))
    uncongested = rows[1]["accepted_ms_p99"]
    return [each | {"p99_vs_uncongested": round(each["accepted_ms_p99"] / uncongested, 3)} for each in rows]


def row(load: str, calls: list[Call], seconds: float) -> dict[str, Any]:
    """One row of the results, printed."""
    values = {"load": load, **summary(calls, seconds)}
    print(f"{load:>12} " + " ".join(f"{values[name] or float('nan'):>16.1f}" for name in COLUMNS), flush=True)
    return values


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint directory; the streaming benchmark's own by default")
    parser.add_argument("--seqs", type=int, default=16, help="max_num_seqs and max_num_queued_reqs")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each call")
    parser.add_argument("--seconds", type=float, default=20, help="length of each load")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = (arguments.model or default_model()).resolve()
    bounds = {"max_num_seqs": arguments.seqs, "max_num_queued_reqs": arguments.seqs}
    with bitmill_server(model.parent) as (_, address):
        load_model(address, model, **bounds)
        print(f"{'load':>12} " + " ".join(f"{name:>16}" for name in COLUMNS), flush=True)
        rows = uvloop.run(measure(address, arguments))
    overload = rows[-1]
    print(
        f"accepted p99 {overload['p99_vs_uncongested']} times the uncongested (goal: {GOAL_P99_RATIO}), "
        f"refusals' p99 {overload['refusal_ms_p99']} ms (goal: {GOAL_REFUSAL_MS})"
    )
    about = versions() | {"model": model.name, "tokens": arguments.tokens, **bounds}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps([each | {"about": about} for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
