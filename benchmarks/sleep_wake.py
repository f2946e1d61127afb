"""What SleepModel frees on a GPU, how long it and WakeModel take, and whether the model answers as before.

    python benchmarks/sleep_wake.py --model DIR [--cycles 3]

Needs a CUDA device and an environment with bitmill-inference and vLLM, whose python runs this. A server of its own
loads the model with enable_sleep_mode; each cycle generates greedily from fixed prompts, sleeps, wakes and generates
again. At the end the model is put to sleep once more and the server gets SIGTERM: it must end with status 0 and leave
no process. Exits with status 1 when anything differs. Writes benchmarks/results/sleep_wake.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import psutil

from bitmill.inference.v1 import generation_pb2, inference_service_pb2_grpc, model_pb2, model_service_pb2_grpc
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill.inference.v1 import model_service_pb2 as model_pb

RESULTS = Path(__file__).parents[1] / "benchmarks/results/sleep_wake.json"
NAME = "sleeper"
PROMPTS = ("The capital of France is", "def quicksort(values):", "Once upon a time", "1, 1, 2, 3, 5, 8,")
TOKENS = 64
TIMEOUT_S = 900


class Server:
    """A server process with the model loaded."""

    def __init__(self, model: Path, kv_cache_bytes: int) -> None:
        command = ["-m", "bitmill_inference", "--address", "127.0.0.1:0", "--model-roots", model.parent.as_uri()]
        self.process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        self.channel = grpc.insecure_channel(self._address())
        self.inference = inference_service_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)
        options = model_pb2.EngineOptions(enable_sleep_mode=True, kv_cache_memory_bytes=kv_cache_bytes)
        request = model_pb.LoadModelRequest(name=NAME, uri=model.as_uri(), engine_options=options)
        self.models.LoadModel(request, timeout=TIMEOUT_S)

    def _address(self) -> str:
        """Reads the log to the server's address, and goes on reading it in another process, lest the pipe fill up."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if '"server_started"' in line:
                subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=sys.stderr)
                return str(json.loads(line)["address"])
        raise SystemExit("the server did not start")

    def answers(self) -> list[list[int]]:
        """The greedy token ids after each prompt, one prompt at a time."""
        sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        requests = [pb.GenerateUnaryRequest(model=NAME, text=text, sampling_params=sampling) for text in PROMPTS]
        return [list(self.inference.GenerateUnary(each, timeout=60).sequences[0].token_ids) for each in requests]

    def sleep(self) -> float:
        """Puts the model to sleep and returns the seconds that it took."""
        began = time.perf_counter()
        state = self.models.SleepModel(model_pb.SleepModelRequest(name=NAME), timeout=TIMEOUT_S).model.state
        assert state == model_pb2.MODEL_STATE_SLEEPING, state
        return time.perf_counter() - began

    def wake(self) -> float:
        """Wakes the model and returns the seconds that it took."""
        began = time.perf_counter()
        model = self.models.WakeModel(model_pb.WakeModelRequest(name=NAME), timeout=TIMEOUT_S).model
        assert model.state == model_pb2.MODEL_STATE_SERVING, model
        assert model.restarts == 0, "the server found that the model does not answer as before"
        return time.perf_counter() - began

    def refusal(self) -> grpc.StatusCode:
        """The status of a call."""
        try:
            self.inference.GenerateUnary(pb.GenerateUnaryRequest(model=NAME, text="a"), timeout=60)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def stop(self) -> tuple[int, list[str]]:
        """Sends SIGTERM; returns the exit status and the processes that are left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        children = [child for child in children if child.name() != "cat"]
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        _, alive = psutil.wait_procs(children, timeout=60)
        return status, [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def gpu_memory_mib() -> int:
    """MiB in use on the first GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def gpu_name() -> str:
    """Name of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()


def cycle(server: Server, expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Sleeps and wakes once."""
    awake_mib = gpu_memory_mib()
    sleep_s = server.sleep()
    asleep_mib = gpu_memory_mib()
    refused = server.refusal() is grpc.StatusCode.UNAVAILABLE
    wake_s = server.wake()
    return {
        "awake_mib": awake_mib,
        "asleep_mib": asleep_mib,
        "freed_mib": awake_mib - asleep_mib,
        "awake_again_mib": gpu_memory_mib(),
        "sleep_s": round(sleep_s, 3),
        "wake_s": round(wake_s, 3),
        "refused_while_asleep": refused,
        "same_tokens": server.answers() == expected,
    }


def main() -> None:
    """Runs the cycles and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint or an artifact's directory")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=int, default=2 * 2**30)
    arguments = parser.parse_args()
    empty_mib = gpu_memory_mib()
    server = Server(arguments.model.resolve(), arguments.kv_cache_bytes)
    try:
        expected = server.answers()
        cycles = [cycle(server, expected) for _ in range(arguments.cycles)]
        server.sleep()
        status, left = server.stop()
    except BaseException:
        server.process.kill()
        raise
    result = {
        "device": gpu_name(),
        "model": arguments.model.name,
        "kv_cache_bytes": arguments.kv_cache_bytes,
        "memory_before_load_mib": empty_mib,
        "cycles": cycles,
        "exit_status_asleep": status,
        "processes_left": left,
        "versions": {"vllm": version("vllm"), "torch": version("torch"), "python": platform.python_version()},
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    good = all(each["same_tokens"] and each["refused_while_asleep"] and each["freed_mib"] > 0 for each in cycles)
    sys.exit(0 if good and status == 0 and not left else 1)


if __name__ == "__main__":
    main()
