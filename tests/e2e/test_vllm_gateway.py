"""The real SMG gateway in front of two bitmill servers, and vLLM's contract on one of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from bitmill.inference.v1 import inference_service_pb2
from support.inference_process import InferenceProcess

TIMEOUT_S = 120
PROMPT = "Hello there"
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


class Gateway:
    """A gateway that takes turns between its workers, and its log."""

    def __init__(self, workers: list[InferenceProcess], tokenizer: Path) -> None:
        port, metrics_port = _free_port(), _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("smg"), "launch", "--host", "127.0.0.1", "--port", port),
                *("--worker-urls", *(f"grpc://{worker.address}" for worker in workers)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port),
                *("--model-path", tokenizer, "--policy", "round_robin"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self._wait_for_log("Starting server on", 1)
        self._wait_for_log("Activated 1 of 1 worker", len(workers))

    def post(self, path: str, **body: Any) -> Any:
        """Returns the answer to a request for the model "tiny"."""
        with self._open(path, body) as response:
            return json.load(response)

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        """Yields the events that answer a request for the model "tiny"."""
        with self._open(path, body | {"stream": True}) as response:
            yield from (json.loads(line.removeprefix(b"data: ")) for line in response if line.startswith(b"data: {"))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        content = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        request = urllib.request.Request(self._url + path, content, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def _wait_for_log(self, text: str, count: int) -> None:
        with self._logged:
            there = self._logged.wait_for(lambda: sum(text in line for line in self.log) >= count, TIMEOUT_S)
        assert there, "\n".join(self.log)

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._logged:
                self.log.append(line.rstrip("\n"))
                self._logged.notify_all()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def workers(
    inference_server: InferenceProcess,
    inference_python: Path,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[InferenceProcess]]:
    """Two servers with the tiny checkpoint; the second is this module's own."""
    flags = ("--vllm-service-model", "tiny")
    cache = tmp_path_factory.mktemp("second-cache")
    second = InferenceProcess(inference_python, [tiny_checkpoint.parent], cache, flags)
    try:
        second.load("tiny", tiny_checkpoint)
        yield [inference_server, second]
    finally:
        # A test may have ended it.
        if second.pid in psutil.pids():
            second.terminate()
            second.wait()


@pytest.fixture(scope="module")
def gateway(workers: list[InferenceProcess], tiny_checkpoint: Path) -> Iterator[Gateway]:
    running = Gateway(workers, tiny_checkpoint)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def stub(inference_server: InferenceProcess) -> pb_grpc.VllmEngineStub:
    """vLLM's contract on the session's server."""
    return pb_grpc.VllmEngineStub(inference_server.channel)


def request(max_tokens: int, request_id: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex,
        tokenized={"input_ids": [5, 6, 7]},
        sampling_params={"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        stream=True,
    )


def test_the_contract_is_served_from_the_same_engine(
    inference_server: InferenceProcess, stub: pb_grpc.VllmEngineStub
) -> None:
    """The same token ids as bitmill's own service, and the model's own name."""
    responses = list(stub.Generate(request(8), timeout=TIMEOUT_S))
    own = inference_server.inference.GenerateUnary(
        inference_service_pb2.GenerateUnaryRequest(
            model="tiny",
            token_ids={"ids": [5, 6, 7]},
            sampling_params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        ),
        timeout=TIMEOUT_S,
    )
    streamed = [token for response in responses for token in response.chunk.token_ids]
    assert streamed == list(own.sequences[0].token_ids)
    assert responses[-1].complete.finish_reason == "length"
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S).served_model_name == "tiny"
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy


def test_abort_by_id_ends_a_request_of_the_contract(stub: pb_grpc.VllmEngineStub) -> None:
    """And the load that the contract reports counts it while it runs."""
    request_id = uuid.uuid4().hex
    call = stub.Generate(request(400, request_id), timeout=TIMEOUT_S)
    assert next(call).chunk.token_ids
    (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads
    assert load.num_running_reqs + load.num_waiting_reqs == 1
    stub.Abort(pb.AbortRequest(request_ids=[request_id]), timeout=TIMEOUT_S)
    assert list(call)[-1].complete.finish_reason == "abort"
    (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads
    assert load.num_running_reqs + load.num_waiting_reqs == 0


def test_a_wrong_request_has_the_contracts_status(stub: pb_grpc.VllmEngineStub) -> None:
    """smg's own, which the server passes on."""
    wrong = request(8)
    wrong.sampling_params.temperature = -1
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(wrong, timeout=TIMEOUT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in caught.value.details()


def test_a_pattern_that_would_end_the_server_is_refused(stub: pb_grpc.VllmEngineStub) -> None:
    """xgrammar's parser of patterns in schemas overflows its stack on it."""
    wrong = request(8)
    wrong.sampling_params.json_schema = json.dumps({"type": "string", "pattern": "a" + "*" * 60_000})
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(wrong, timeout=TIMEOUT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 4096" in caught.value.details()


def test_the_gateway_answers_completions_and_chat_from_both_workers(
    gateway: Gateway, workers: list[InferenceProcess]
) -> None:
    """OpenAI's API in front, with the text that bitmill itself gives."""
    generate = inference_service_pb2.GenerateUnaryRequest(
        model="tiny", text=PROMPT, sampling_params={"temperature": 0, "max_tokens": 8}
    )
    own = workers[0].inference.GenerateUnary(generate, timeout=TIMEOUT_S).sequences[0].text
    before = [sum(GENERATE in line for line in worker.log) for worker in workers]
    for _ in range(4):
        (choice,) = gateway.post("/v1/completions", prompt=PROMPT, max_tokens=8)["choices"]
        assert choice["text"] == own
    messages = [{"role": "user", "content": PROMPT}]
    answer = gateway.post("/v1/chat/completions", messages=messages, max_tokens=8)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 8
    events = list(gateway.stream("/v1/chat/completions", messages=messages, max_tokens=8))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    for worker, count in zip(workers, before, strict=True):
        worker.wait_for_lines(GENERATE, count + 3)


def test_a_worker_can_be_drained_behind_the_gateway(gateway: Gateway, workers: list[InferenceProcess]) -> None:
    """Streams that run on it end as they should, and no request fails while it goes or once it is gone."""

    def complete() -> str:
        return str(gateway.post("/v1/completions", prompt=PROMPT, max_tokens=8)["choices"][0]["finish_reason"])

    streams = [gateway.stream("/v1/completions", prompt=PROMPT, max_tokens=400, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    workers[1].terminate()
    assert [complete() for _ in range(8)] == ["length"] * 8
    assert [list(stream)[-1]["choices"][0]["finish_reason"] for stream in streams] == ["length"] * 4
    assert workers[1].wait() == 0
    assert [complete() for _ in range(4)] == ["length"] * 4
