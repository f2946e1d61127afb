"""Real vLLM with more calls than it has room for, with callers who leave, and with callers who do not read."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from prometheus_client.parser import text_string_to_metric_families

from bitmill.inference.v1 import generation_pb2, inference_service_pb2_grpc, model_pb2, model_service_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import InferenceProcess
from support.inference_serving import error_info

PROMPT = "The assignment statement binds"
GREEDY = {"temperature": 0, "ignore_eos": True}
SEVERAL = {"temperature": 1, "seed": 7}
TIMEOUT_S = 120
QUEUE = 3
QUEUE_TOKENS = 200


@pytest.fixture(scope="module")
def bounded(inference_server: InferenceProcess, tiny_checkpoint: Path) -> Iterator[InferenceProcess]:
    """The server with a further model "bounded": one sequence at a time, and few that wait, by priority."""
    options = {
        "max_num_seqs": 1,
        "max_num_queued_reqs": QUEUE,
        "max_num_queued_tokens": QUEUE_TOKENS,
        "scheduling_policy": "priority",
    }
    inference_server.load("bounded", tiny_checkpoint, **options)
    yield inference_server
    inference_server.unload("bounded")


def request(model: str, text: str = PROMPT, **sampling: Any) -> dict[str, Any]:
    params = generation_pb2.SamplingParams(**GREEDY | sampling)
    return {"model": model, "text": text, "sampling_params": params}


def start(server: InferenceProcess, model: str, *, timeout: float = TIMEOUT_S, **fields: Any) -> Any:
    """Starts a stream, which runs until it is read to its end or cancelled."""
    return server.inference.Generate(pb.GenerateRequest(**request(model, **fields)), timeout=timeout)


def load_of(server: InferenceProcess, model: str) -> model_pb2.ModelLoad:
    (load,) = server.models.GetLoad(model_service_pb2.GetLoadRequest(model=model)).loads
    return load


def until_load(server: InferenceProcess, model: str, **numbers: float) -> model_pb2.ModelLoad:
    """Returns the load once it has these numbers."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        load = load_of(server, model)
        if all(getattr(load, name) == number for name, number in numbers.items()):
            return load
        assert time.monotonic() < deadline, f"never {numbers}: {load}"


def until_idle(server: InferenceProcess, model: str) -> None:
    until_load(server, model, running_requests=0, waiting_requests=0, kv_cache_usage=0)


def metric(server: InferenceProcess, name: str, model: str) -> float:
    address = server.wait_for_event("metrics_started")["address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    (value,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"bitmill_inference_{name}" and sample.labels["model"] == model
    ]
    return float(value)


def refusal(server: InferenceProcess, **fields: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        server.inference.GenerateUnary(pb.GenerateUnaryRequest(**request("bounded", **fields)), timeout=TIMEOUT_S)
    return caught.value


def test_the_counts_return_to_zero_however_a_call_ends(inference_server: InferenceProcess) -> None:
    """Read to its end, cancelled, late, or aborted: the engine has nothing of it any more."""
    until_idle(inference_server, "tiny")
    whole, cancelled, late = (start(inference_server, "tiny") for _ in range(3))
    fields = pb.GenerateRequest(**request("tiny"))
    aborted = inference_server.inference.Generate(fields, metadata=(("x-request-id", "abort-me"),))
    for stream in (whole, cancelled, late, aborted):
        next(stream)
    load = until_load(inference_server, "tiny", running_requests=4)
    assert 0 < load.kv_cache_usage <= 1
    assert load.max_num_seqs == 16
    cancelled.cancel()
    inference_server.inference.Abort(pb.AbortRequest(request_ids=["abort-me"]))
    assert list(aborted)[-1].finish.reason == generation_pb2.FINISH_REASON_ABORT
    late.cancel()
    assert list(whole)[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH
    until_idle(inference_server, "tiny")


def test_a_deadline_frees_the_engine(inference_server: InferenceProcess) -> None:
    until_idle(inference_server, "tiny")
    with pytest.raises(grpc.RpcError) as caught:
        list(start(inference_server, "tiny", **SEVERAL, n=8, timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until_idle(inference_server, "tiny")


def test_the_load_and_the_metrics_count_every_token(inference_server: InferenceProcess) -> None:
    """Those of unary calls as those of streams, and each of n sequences."""
    before = {name: metric(inference_server, f"{name}_tokens_total", "tiny") for name in ("prompt", "generation")}
    answer = inference_server.inference.GenerateUnary(
        pb.GenerateUnaryRequest(**request("tiny", **SEVERAL, n=3, max_tokens=50)), timeout=TIMEOUT_S
    )
    streamed = list(start(inference_server, "tiny", max_tokens=50))[-1].usage
    load = load_of(inference_server, "tiny")
    assert load.generation_tokens_per_second > 0
    assert load.prompt_tokens_per_second > 0
    prompts = 3 * answer.usage.prompt_tokens + streamed.prompt_tokens
    assert metric(inference_server, "prompt_tokens_total", "tiny") - before["prompt"] == prompts
    generated = answer.usage.completion_tokens + streamed.completion_tokens
    assert metric(inference_server, "generation_tokens_total", "tiny") - before["generation"] == generated == 200


def test_waiting_requests_run_by_priority(bounded: InferenceProcess) -> None:
    """The one with the lower number first, though it came last."""
    running = start(bounded, "bounded")
    next(running)
    ended: SimpleQueue[int] = SimpleQueue()
    for waiting, priority in enumerate((1, -1), start=1):
        options = generation_pb2.RequestOptions(priority=priority)
        fields = pb.GenerateUnaryRequest(**request("bounded", max_tokens=8), request_options=options)
        call = bounded.inference.GenerateUnary.future(fields, timeout=TIMEOUT_S)
        call.add_done_callback(lambda call, priority=priority: ended.put(priority if call.code().name == "OK" else 0))
        until_load(bounded, "bounded", running_requests=1, waiting_requests=waiting)
    running.cancel()
    assert [ended.get(timeout=TIMEOUT_S) for _ in range(2)] == [-1, 1]


def test_a_full_queue_refuses_at_once_and_a_freed_place_is_usable_at_once(bounded: InferenceProcess) -> None:
    streams = [start(bounded, "bounded") for _ in range(QUEUE)]
    next(streams[0])
    load = until_load(bounded, "bounded", running_requests=1, waiting_requests=QUEUE - 1)
    refused_before = load.refused_calls
    error = refusal(bounded, max_tokens=1)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    info = error_info(error)
    assert (info.reason, dict(info.metadata)) == ("QUEUE_FULL", {"held": "3", "asked": "1", "limit": "3"})
    assert retry_delay(error) > 0
    assert load_of(bounded, "bounded").refused_calls == refused_before + 1
    streams[0].cancel()
    until_load(bounded, "bounded", running_requests=1, waiting_requests=QUEUE - 2)
    streams.append(start(bounded, "bounded", max_tokens=1))
    for stream in streams[1:]:
        assert list(stream)[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH
    until_idle(bounded, "bounded")


def test_a_burst_leaves_no_more_in_the_queue_than_its_bound(bounded: InferenceProcess) -> None:
    """Calls that are still being tokenized count; those over the bound are refused, and the others are served."""
    calls = [
        bounded.inference.GenerateUnary.future(
            pb.GenerateUnaryRequest(**request("bounded", text=f"{number} is", max_tokens=20)), timeout=TIMEOUT_S
        )
        for number in range(20)
    ]
    codes = [call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert codes.count(grpc.StatusCode.OK) >= QUEUE
    until_idle(bounded, "bounded")


def test_prompts_that_wait_for_their_first_token_are_bounded_in_tokens(bounded: InferenceProcess) -> None:
    running = start(bounded, "bounded")
    next(running)
    waiting = start(bounded, "bounded", text=PROMPT * 50, max_tokens=1)
    until_load(bounded, "bounded", running_requests=1, waiting_requests=1)
    error = refusal(bounded, max_tokens=1)
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "QUEUE_TOKENS_FULL")
    running.cancel()
    assert list(waiting)[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH
    until_idle(bounded, "bounded")


def test_more_sequences_than_the_queue_could_ever_hold_are_invalid(bounded: InferenceProcess) -> None:
    error = refusal(bounded, **SEVERAL, n=QUEUE + 1)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).reason == "TOO_MANY_SEQUENCES"


def test_a_waiting_call_that_misses_its_deadline_never_runs(bounded: InferenceProcess) -> None:
    """The engine never sees its prompt."""
    before = metric(bounded, "prompt_tokens_total", "bounded")
    running = start(bounded, "bounded")
    next(running)
    with pytest.raises(grpc.RpcError) as caught:
        list(start(bounded, "bounded", text=PROMPT * 5, timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until_load(bounded, "bounded", running_requests=1, waiting_requests=0)
    usage = list(running)[-1].usage
    until_idle(bounded, "bounded")
    assert metric(bounded, "prompt_tokens_total", "bounded") - before == usage.prompt_tokens


def test_a_caller_who_does_not_read_holds_up_nobody_and_misses_nothing(inference_server: InferenceProcess) -> None:
    """Its engine is done and others are served before it reads; what waits for it is merged, not piled up."""
    until_idle(inference_server, "tiny")
    sampling = {**SEVERAL, "n": 16, "max_tokens": 450}
    # A window of the smallest size, so that a part of the answer fills it.
    options = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    with grpc.insecure_channel(inference_server.address, options) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        unread = stub.Generate(pb.GenerateRequest(**request("tiny", **sampling)), timeout=TIMEOUT_S)
        until_load(inference_server, "tiny", running_requests=16)
        whole = inference_server.inference.GenerateUnary(
            pb.GenerateUnaryRequest(**request("tiny", **sampling)), timeout=TIMEOUT_S
        )
        until_idle(inference_server, "tiny")
        chunks = list(unread)
    for sequence in whole.sequences:
        own = [chunk for chunk in chunks if chunk.index == sequence.index]
        assert "".join(chunk.text for chunk in own) == sequence.text
        assert [token_id for chunk in own for token_id in chunk.token_ids] == sequence.token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16 * 450
    assert len(chunks) < whole.usage.completion_tokens / 2


def retry_delay(error: grpc.RpcError) -> float:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    return float(retry.retry_delay.ToTimedelta().total_seconds())
