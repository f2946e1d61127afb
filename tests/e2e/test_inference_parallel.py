"""Models that are split over two workers, and models of which two copies share the requests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bitmill.inference.v1 import inference_service_pb2
from support.inference_process import InferenceProcess, outliving

SCRIPT = Path(__file__).parents[1] / "support/plain_generation.py"
NUM_TOKENS = 12
PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [42], [700, 3, 3, 9, 11, 13]]
TIMEOUT_S = 120


@pytest.fixture
def server(inference_python: Path, tiny_checkpoints: Path, tmp_path: Path) -> Iterator[InferenceProcess]:
    """A server whose engines have one core for each of two ranks. It is killed in the end."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    running = InferenceProcess(inference_python, [tiny_checkpoints], tmp_path / "cache", environment=cores)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def expected(engine_python: Path, untied_checkpoint: Path) -> list[list[int]]:
    """What follows each of the prompts, by a computation on one process."""
    arguments = [engine_python, SCRIPT, untied_checkpoint, str(NUM_TOKENS), json.dumps(PROMPTS)]
    answer = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    return [list(map(int, ids)) for ids in json.loads(answer.stdout)]


def generate(server: InferenceProcess, model: str, prompt: list[int]) -> list[int]:
    request = inference_service_pb2.GenerateUnaryRequest(
        model=model,
        token_ids={"ids": prompt},
        sampling_params={"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    )
    return list(server.inference.GenerateUnary(request, timeout=TIMEOUT_S).sequences[0].token_ids)


def engine_processes(server: InferenceProcess) -> set[psutil.Process]:
    """Every process of the engines; Python's own helper is the server's."""
    return {child for child in server.children() if "resource_tracker" not in " ".join(child.cmdline())}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_two_tensor_parallel_workers_generate_what_one_process_does(
    server: InferenceProcess, untied_checkpoint: Path, expected: list[list[int]]
) -> None:
    """Each has half of every layer. In 32-bit floats the order of the sums changes no token."""
    server.load("split", untied_checkpoint, tensor_parallel_size=2, dtype="float32")
    processes = engine_processes(server)
    assert sum("Worker" in process.name() for process in processes) == 2
    assert [generate(server, "split", prompt) for prompt in PROMPTS] == expected
    server.unload("split")
    assert outliving(processes) == []


def test_two_data_parallel_copies_share_the_requests(
    server: InferenceProcess, untied_checkpoint: Path, expected: list[list[int]]
) -> None:
    """Both copies work, and a request has the same answer whichever gets it. None outlives a server that is killed."""
    server.load("copied", untied_checkpoint, data_parallel_size=2, dtype="float32")
    processes = engine_processes(server)
    copies = server.engine_cores()
    assert len(copies) == 2
    idle = {copy: cpu_seconds(copy) for copy in copies}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: generate(server, "copied", prompt), PROMPTS * 8))
    assert answers == expected * 8
    assert all(cpu_seconds(copy) > seconds for copy, seconds in idle.items())
    server.kill()
    assert outliving(processes) == []
