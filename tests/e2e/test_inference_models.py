"""Real models under load: options that reach the engine, a hot swap, an engine that dies and comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2, model_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from support.inference_process import (
    ENGINE_OPTIONS,
    LOAD_TIMEOUT_S,
    STOP_TIMEOUT_S,
    InferenceProcess,
    outliving,
)
from support.inference_serving import error_info

ALIAS = "chat"
GREEDY = generation_pb2.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = generation_pb2.SamplingParams(temperature=0, ignore_eos=True)
WINDOW = 32


def generate(server: InferenceProcess, model: str, text: str = "A generator is") -> list[int]:
    request = pb.GenerateUnaryRequest(model=model, text=text, sampling_params=GREEDY)
    return list(server.inference.GenerateUnary(request, timeout=LOAD_TIMEOUT_S).sequences[0].token_ids)


def logprobs(server: InferenceProcess, model: str, text: str) -> list[float]:
    """Of the likeliest tokens after a text: what the model makes of all of it."""
    sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=1, logprobs=10)
    request = pb.GenerateUnaryRequest(model=model, text=text, sampling_params=sampling)
    answer = server.inference.GenerateUnary(request, timeout=LOAD_TIMEOUT_S).sequences[0]
    return [entry.logprob for entry in answer.logprobs[0].top]


class Callers:
    """Four callers that stream from the alias all the time. Whatever fails is raised at the end."""

    def __init__(self, server: InferenceProcess) -> None:
        self._server = server
        self._stopping = threading.Event()
        self._finished = threading.Semaphore(0)

    def __enter__(self) -> Callers:
        self._pool = ThreadPoolExecutor(4)
        self._calls = [self._pool.submit(self._call) for _ in range(4)]
        self.wait_for(4)
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for call in self._calls:
            call.result()

    def wait_for(self, count: int) -> None:
        """Returns when that many more calls have ended well."""
        for _ in range(count):
            assert self._finished.acquire(timeout=LOAD_TIMEOUT_S)

    def _call(self) -> None:
        while not self._stopping.is_set():
            request = pb.GenerateRequest(model=ALIAS, text="A generator is", sampling_params=GREEDY)
            chunks = list(self._server.inference.Generate(request, timeout=LOAD_TIMEOUT_S))
            assert sum(len(chunk.token_ids) for chunk in chunks) == GREEDY.max_tokens
            self._finished.release()


def set_alias(server: InferenceProcess, name: str) -> None:
    server.models.SetAlias(model_pb.SetAliasRequest(alias=ALIAS, name=name))


@pytest.fixture(scope="module")
def second(inference_server: InferenceProcess, tiny_checkpoint: Path) -> Iterator[str]:
    """The same weights once more with options of every kind, swapped in for the first under load."""
    set_alias(inference_server, "tiny")
    options = model_pb2.EngineOptions(
        **ENGINE_OPTIONS,
        max_model_len=256,
        max_num_batched_tokens=128,
        block_size=32,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        scheduling_policy="priority",
        max_num_queued_reqs=64,
        max_num_queued_tokens=8192,
        distributed_executor_backend="mp",
        runner="generate",
    )
    options.hf_overrides.update({"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention"]})
    request = model_pb.LoadModelRequest(
        name="second", uri=tiny_checkpoint.as_uri(), engine_options=options, aliases=[ALIAS]
    )
    with Callers(inference_server) as callers:
        model = inference_server.models.LoadModel(request, timeout=LOAD_TIMEOUT_S).model
        callers.wait_for(8)
    assert list(model.aliases) == [ALIAS]
    assert list(inference_server.get("tiny").aliases) == []
    yield "second"
    models = inference_server.models.ListModels(model_pb.ListModelsRequest()).models
    if "second" in {model.name for model in models}:
        inference_server.unload("second")


def test_options_reach_the_engine(inference_server: InferenceProcess, second: str) -> None:
    """The context is as asked for; with a sliding window a long prompt is read otherwise, and a short one is not."""
    assert inference_server.get(second).max_model_len == 256
    short, long = "A generator is", "A tuple holds values. " * 8
    assert logprobs(inference_server, second, short) == pytest.approx(
        logprobs(inference_server, "tiny", short), abs=1e-3
    )
    assert logprobs(inference_server, second, long) != pytest.approx(logprobs(inference_server, "tiny", long), abs=1e-3)
    request = pb.GenerateUnaryRequest(
        model=second, text=short, sampling_params=GREEDY, request_options=generation_pb2.RequestOptions(priority=-1)
    )
    assert inference_server.inference.GenerateUnary(request, timeout=LOAD_TIMEOUT_S).sequences[0].token_ids
    load = inference_server.models.GetLoad(model_pb.GetLoadRequest(model=second)).loads[0]
    assert (load.max_num_seqs, load.max_num_queued_reqs) == (16, 64)


def test_a_model_whose_engine_is_killed_serves_again_without_help(
    inference_server: InferenceProcess, second: str
) -> None:
    """The running stream ends UNAVAILABLE, health and watchers learn of it, the others serve on; then all is well."""
    before = generate(inference_server, second)
    watching = inference_server.models.WatchModel(model_pb.WatchModelRequest(name=second), timeout=LOAD_TIMEOUT_S)
    assert next(watching).model.state == model_pb2.MODEL_STATE_SERVING
    # That of "tiny" is the elder one.
    core = max(inference_server.engine_cores(), key=lambda process: process.create_time())
    workers = set(core.children(recursive=True))
    request = pb.GenerateRequest(model=second, text="a", sampling_params=ENDLESS)
    stream = inference_server.inference.Generate(request, timeout=LOAD_TIMEOUT_S)
    next(stream)
    core.kill()
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
    restarting = next(watching).model
    assert (restarting.state, restarting.error.reason) == (model_pb2.MODEL_STATE_RESTARTING, "ENGINE_DIED")
    for name in (second, ALIAS):
        assert not inference_server.is_serving(name)
    with pytest.raises(grpc.RpcError) as refused:
        generate(inference_server, ALIAS)
    assert error_info(refused.value).reason == "MODEL_RESTARTING"
    assert generate(inference_server, "tiny")
    again = next(watching).model
    assert (again.state, again.restarts) == (model_pb2.MODEL_STATE_SERVING, 1)
    assert inference_server.is_serving(ALIAS)
    assert generate(inference_server, ALIAS) == before
    assert outliving({core} | workers) == []


def test_a_hot_swap_under_load_fails_no_call(inference_server: InferenceProcess, second: str) -> None:
    """Back and forth by SetAlias, and at last with the unload of the one that is replaced."""
    cores = inference_server.engine_cores()
    with Callers(inference_server) as callers:
        for name in ("tiny", second, "tiny", second):
            set_alias(inference_server, name)
            callers.wait_for(4)
        tiny = inference_server.get("tiny")
        request = model_pb.LoadModelRequest(
            name="tiny", uri=tiny.uri, engine_options=tiny.engine_options, aliases=[ALIAS], unload_replaced=True
        )
        inference_server.models.LoadModel(request, timeout=LOAD_TIMEOUT_S)
        gone = False
        watching = inference_server.models.WatchModel(model_pb.WatchModelRequest(name=second), timeout=STOP_TIMEOUT_S)
        try:
            gone = [response.model.state for response in watching][-1] == model_pb2.MODEL_STATE_UNLOADED
        except grpc.RpcError as error:
            gone = error.code() == grpc.StatusCode.NOT_FOUND
        assert gone
        callers.wait_for(8)
    assert len(inference_server.engine_cores()) == len(cores) - 1
    inference_server.models.DeleteAlias(model_pb.DeleteAliasRequest(alias=ALIAS))
