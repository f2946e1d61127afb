"""The servers that the streaming benchmark compares, all with one model and one set of engine options.

Each server has a process of its own with an engine of its own, and a client process of its own that stays connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from streaming_clients import MODEL_NAME
from streaming_round import Round, prompt_of, run_round

CLIENT = Path(__file__).with_name("streaming_clients.py")
START_TIMEOUT_S = 600
POLL_S = 0.5

ENGINE_OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 256 * 1024**2,
    "enforce_eager": True,
}


class InProcess:
    """`AsyncLLM` in this process, used as vLLM documents it. The streams are tasks of this process."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(model), load_format="safetensors", disable_log_stats=True, **ENGINE_OPTIONS
        )
        this = psutil.Process()
        before = set(this.children(recursive=True))
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._engine = set(this.children(recursive=True)) - before
        self._ids = iter(range(10**9))

    async def stream(self, index: int, tokens: int) -> AsyncIterator[int]:
        """See `Stream`: text in, text and token ids out."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, skip_clone=True
        )
        renderer = self._llm.renderer
        (engine_input,) = await renderer.render_cmpl_async(
            [{"prompt": prompt_of(index)}], renderer.default_cmpl_tok_params
        )
        async for output in self._llm.generate(engine_input, params, str(next(self._ids))):
            sequence = output.outputs[0]
            _ = sequence.text
            yield len(sequence.token_ids)

    async def run(self, streams: int, tokens: int) -> Round:
        """One round."""
        engine_start = cpu_seconds(self._engine)
        measured = await run_round(self.stream, streams, tokens)
        measured.engine_cpu_s = cpu_seconds(self._engine) - engine_start
        measured.server_cpu_s, measured.client_cpu_s = measured.client_cpu_s, 0
        return measured

    def close(self) -> None:
        """Stops the engine."""
        self._llm.shutdown()
        # Its finalizer fails when the interpreter is already half gone.
        del self._llm


class ServedSide:
    """A server that listens on `address`, and its client process."""

    def __init__(self, name: str, server: subprocess.Popen[Any], address: str, model: Path) -> None:
        self._server = psutil.Process(server.pid)
        self._engine = set(self._server.children(recursive=True))
        self._client = subprocess.Popen(
            [sys.executable, CLIENT, name, address, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    async def run(self, streams: int, tokens: int) -> Round:
        """One round."""
        server_start, engine_start = cpu_seconds({self._server}), cpu_seconds(self._engine)
        answer = await asyncio.to_thread(self._ask, streams, tokens)
        measured = Round(**json.loads(answer))
        measured.server_cpu_s = cpu_seconds({self._server}) - server_start
        measured.engine_cpu_s = cpu_seconds(self._engine) - engine_start
        return measured

    def close(self) -> None:
        """Ends the client."""
        assert self._client.stdin is not None
        self._client.stdin.close()
        self._client.wait()

    def _ask(self, streams: int, tokens: int) -> str:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps([streams, tokens]) + "\n")
        if not (answer := self._client.stdout.readline()):
            raise RuntimeError(f"the client ended with exit code {self._client.wait()}")
        return answer


@contextlib.contextmanager
def bitmill_server(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """bitmill's server for the checkpoints in a directory, and its address."""
    with tempfile.TemporaryDirectory() as cache_dir:
        arguments = ["--address", "127.0.0.1:0", "--model-roots", root.as_uri(), "--cache-dir", cache_dir]
        server = subprocess.Popen(
            [sys.executable, "-m", "bitmill_inference", *arguments], stderr=subprocess.PIPE, text=True
        )
        with _stopping(server):
            yield server, _address_in_log(server)


@contextlib.contextmanager
def bitmill(model: Path) -> Iterator[ServedSide]:
    """bitmill's server, with the model loaded."""
    with bitmill_server(model.parent) as (server, address):
        load_model(address, model)
        yield from _with_client("bitmill", server, address, model)


@contextlib.contextmanager
def vllm_grpc(model: Path) -> Iterator[ServedSide]:
    """vLLM's gRPC server, `vllm serve --grpc`."""
    yield from _vllm_server("vllm-grpc", "vllm.entrypoints.grpc_server", [], model)


@contextlib.contextmanager
def vllm_http(model: Path) -> Iterator[ServedSide]:
    """vLLM's HTTP server, `vllm serve`, without a log line for each request."""
    options = ["--served-model-name", MODEL_NAME, "--disable-uvicorn-access-log"]
    yield from _vllm_server("vllm-http", "vllm.entrypoints.openai.api_server", options, model)


def _vllm_server(name: str, module: str, options: list[str], model: Path) -> Iterator[ServedSide]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--load-format", "safetensors"]
    for option, value in ENGINE_OPTIONS.items():
        flag = f"--{option.replace('_', '-')}"
        arguments += [flag] if value is True else [flag, str(value)]
    server = subprocess.Popen([sys.executable, "-m", module, *arguments, "--disable-log-stats", *options])
    with _stopping(server):
        _wait_until_ready(server, f"127.0.0.1:{port}", http=name == "vllm-http")
        yield from _with_client(name, server, f"127.0.0.1:{port}", model)


def _with_client(name: str, server: subprocess.Popen[Any], address: str, model: Path) -> Iterator[ServedSide]:
    side = ServedSide(name, server, address, model)
    try:
        yield side
    finally:
        side.close()


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[ServedSide]]] = {
    "bitmill": bitmill,
    "vllm-grpc": vllm_grpc,
    "vllm-http": vllm_http,
}


def load_model(address: str, model: Path, name: str = MODEL_NAME, **options: Any) -> None:
    """Loads the model into bitmill's server, with ENGINE_OPTIONS and `options` over them."""
    import grpc

    from bitmill.inference.v1 import model_service_pb2, model_service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        model_service_pb2_grpc.ModelServiceStub(channel).LoadModel(
            model_service_pb2.LoadModelRequest(name=name, uri=model.as_uri(), engine_options=ENGINE_OPTIONS | options)
        )


def cpu_seconds(processes: set[psutil.Process]) -> float:
    """CPU time that the processes have used."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _address_in_log(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if '"server_started"' in line:
            # Keeps the pipe from filling up.
            subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
            return str(json.loads(line)["address"])
    raise RuntimeError(f"the server ended with exit code {server.wait()}")


def _wait_until_ready(server: subprocess.Popen[Any], address: str, *, http: bool) -> None:
    import grpc

    if not http:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        return
    for _ in range(int(START_TIMEOUT_S / POLL_S)):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"http://{address}/health"):
            return
        # The exit of the server, or the interval.
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise RuntimeError(f"{address}'s server ended with exit code {server.wait(POLL_S)}")
    raise RuntimeError(f"{address} did not answer in {START_TIMEOUT_S} s")


@contextlib.contextmanager
def _stopping(server: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        server.terminate()
        server.wait()
