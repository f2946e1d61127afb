"""The life of real vLLM engines behind the inference service: how they start, fail, die and end."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2, model_pb2, model_service_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common.stores import Stores
from support.inference_artifacts import CPU, publish_artifact
from support.inference_process import STOP_TIMEOUT_S, InferenceProcess, outliving
from support.inference_serving import error_info

GREEDY = generation_pb2.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = generation_pb2.SamplingParams(temperature=0, ignore_eos=True)


def generate(
    server: InferenceProcess, model: str, sampling: generation_pb2.SamplingParams | None = None
) -> pb.GeneratedSequence:
    request = pb.GenerateUnaryRequest(model=model, text="A generator is", sampling_params=sampling)
    return server.inference.GenerateUnary(request).sequences[0]


def test_a_quantized_artifact_chats(inference_server: InferenceProcess, tiny_w4a16: Path, tmp_path: Path) -> None:
    """Made by the real engine, published with its manifest, loaded beside another model."""
    root = Stores([tmp_path.as_uri()]).open(tmp_path.as_uri(), "uri")
    uri = publish_artifact(root, tiny_w4a16, name="milled", devices=[CPU])
    model = inference_server.load("", tmp_path / uri.removeprefix(f"{root.uri}/"))
    try:
        assert (model.name, model.state) == ("milled", model_pb2.MODEL_STATE_SERVING)
        assert model.quantization == "compressed-tensors"
        messages = [generation_pb2.ChatMessage(role="user", content="hi")]
        request = pb.ChatRequest(model="milled", messages=messages, sampling_params=GREEDY)
        assert sum(len(chunk.token_ids) for chunk in inference_server.inference.Chat(request)) == 20
        assert generate(inference_server, "tiny", GREEDY).text
    finally:
        inference_server.unload("milled")


def test_unset_fields_take_the_models_generation_config(
    inference_server: InferenceProcess, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Its temperature, its length, and each of its end-of-sequence tokens, which is no stop match."""
    greedy = generate(inference_server, "tiny", GREEDY)
    end = greedy.token_ids[-1]
    directory = shutil.copytree(tiny_checkpoint, tmp_path / "configured")
    config = json.loads((directory / "generation_config.json").read_text())
    config |= {"temperature": 0.0, "max_new_tokens": 20, "eos_token_id": [config["eos_token_id"], end]}
    (directory / "generation_config.json").write_text(json.dumps(config))
    inference_server.load("configured", directory)
    try:
        endless = generation_pb2.SamplingParams(ignore_eos=True)
        assert generate(inference_server, "configured", endless).token_ids == greedy.token_ids
        overruled = generation_pb2.SamplingParams(temperature=2, seed=1, max_tokens=30, ignore_eos=True)
        assert len(generate(inference_server, "configured", overruled).token_ids) == 30
        ended = generate(inference_server, "configured")
        assert ended.token_ids == greedy.token_ids[: list(greedy.token_ids).index(end) + 1]
        assert ended.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
        asked = generation_pb2.SamplingParams(stop_token_ids=[end])
        assert generate(inference_server, "configured", asked).finish.stop_token_id == end
    finally:
        inference_server.unload("configured")


@pytest.mark.parametrize(
    ("options", "reason", "cause"),
    [
        # Found before a process starts ...
        ({"max_model_len": 1_000_000}, "MAX_MODEL_LEN_TOO_LARGE", "is 1000000; the model's context has 512 tokens"),
        ({"tensor_parallel_size": 1024}, "DEVICES_MISSING", "needs 1024 CPU cores; this server has"),
        ({"enable_sleep_mode": True}, "SLEEP_MODE_UNSUPPORTED", "this server has CPU"),
        # ... and only deep inside one.
        ({"kv_cache_memory_bytes": 1024}, "ENGINE_START_FAILED", "cache blocks"),
    ],
)
def test_an_engine_that_does_not_start_says_why_and_leaves_no_process(
    options: dict[str, int], reason: str, cause: str, inference_server: InferenceProcess, tiny_checkpoint: Path
) -> None:
    """FAILED_PRECONDITION with the reason, or vLLM's own; the model stays listed as FAILED, the others serve on."""
    cores = inference_server.engine_cores()
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.load("failing", tiny_checkpoint, **options)
    try:
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert error_info(caught.value).reason == reason
        assert cause in caught.value.details()
        model = inference_server.get("failing")
        assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_FAILED, reason)
        assert inference_server.engine_cores() == cores
        assert generate(inference_server, "tiny", GREEDY).text
    finally:
        inference_server.unload("failing")


def test_a_model_unloaded_while_its_engine_starts_leaves_no_process(
    inference_server: InferenceProcess, tiny_checkpoint: Path
) -> None:
    """UnloadModel returns when they have ended, and the others serve on."""
    before = inference_server.children()
    beginning = "Initializing a V1 LLM engine"
    starts = sum(beginning in line for line in inference_server.log)
    request = model_service_pb2.LoadModelRequest(name="given-up", uri=tiny_checkpoint.as_uri(), return_immediately=True)
    inference_server.models.LoadModel(request, timeout=STOP_TIMEOUT_S)
    inference_server.wait_for_lines(beginning, starts + 1)
    cores = inference_server.engine_cores() - before
    inference_server.unload("given-up")
    assert cores
    assert not cores & inference_server.children()
    assert outliving(inference_server.children() - before) == []
    assert generate(inference_server, "tiny", GREEDY).text


@pytest.fixture
def own_server(inference_python: Path, tiny_checkpoints: Path, tmp_path: Path) -> InferenceProcess:
    """A server for one test to end, with the tiny model loaded."""
    server = InferenceProcess(inference_python, [tiny_checkpoints], tmp_path / "cache")
    try:
        server.load("tiny", tiny_checkpoints / "tied")
    except BaseException:
        server.kill()
        server.wait()
        raise
    return server


def test_sigterm_lets_running_streams_end_and_leaves_no_process(own_server: InferenceProcess) -> None:
    """New calls are refused, the running one gets its last token, watches end, the exit status is 0."""
    processes = own_server.children()
    watching = own_server.models.WatchModel(model_service_pb2.WatchModelRequest(name="tiny"))
    next(watching)
    stream = own_server.inference.Generate(pb.GenerateRequest(text="a", sampling_params=ENDLESS))
    chunks = list(itertools.islice(stream, 3))
    own_server.terminate()
    own_server.wait_for_event("server_draining")
    with pytest.raises(grpc.RpcError) as ended:
        next(watching)
    assert error_info(ended.value).reason == "SERVER_STOPPING"
    chunks.extend(stream)
    assert chunks[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert sum(len(chunk.token_ids) for chunk in chunks) == chunks[-1].usage.completion_tokens
    assert own_server.wait() == 0
    assert outliving(processes) == []


def test_sigterm_ends_loads_and_restarts_too(own_server: InferenceProcess) -> None:
    """Engines that are just starting end with the rest, and the exit status is 0."""
    (core,) = own_server.engine_cores()
    watching = own_server.models.WatchModel(model_service_pb2.WatchModelRequest(name="tiny"), timeout=STOP_TIMEOUT_S)
    uri = next(watching).model.uri
    core.kill()
    assert next(watching).model.state == model_pb2.MODEL_STATE_RESTARTING
    request = model_service_pb2.LoadModelRequest(name="loading", uri=uri, return_immediately=True)
    own_server.models.LoadModel(request, timeout=STOP_TIMEOUT_S)
    # Of the first start, and of whichever comes next.
    own_server.wait_for_lines("Initializing a V1 LLM engine", 2)
    processes = own_server.children()
    own_server.terminate()
    assert own_server.wait() == 0
    assert outliving(processes) == []


def test_no_engine_outlives_a_server_that_was_killed(own_server: InferenceProcess) -> None:
    """Neither one that serves nor one that is just starting."""
    serving = own_server.children()
    model = own_server.get("tiny")
    request = model_service_pb2.LoadModelRequest(name="starting", uri=model.uri, return_immediately=True)
    own_server.models.LoadModel(request, timeout=STOP_TIMEOUT_S)
    # The second engine core says it, once its own process runs.
    own_server.wait_for_lines("Initializing a V1 LLM engine", 2)
    processes = serving | own_server.children()
    own_server.kill()
    assert own_server.wait() != 0
    assert outliving(processes) == []


def test_aborted_calls_end_ok_with_what_they_have(inference_server: InferenceProcess) -> None:
    """A stream and a unary call of the same id, with every sequence; the engine's places are free again."""
    sampling = {"temperature": 1, "ignore_eos": True, "n": 2, "stop": ["never said, so held back"]}
    metadata = (("x-request-id", "aborted"),)
    stream = inference_server.inference.Generate(
        pb.GenerateRequest(model="tiny", text="a", sampling_params=sampling), metadata=metadata, timeout=60
    )
    unary = inference_server.inference.GenerateUnary.future(
        pb.GenerateUnaryRequest(model="tiny", text="a", sampling_params=sampling), metadata=metadata, timeout=60
    )
    deadline = time.monotonic() + 60
    while running_requests(inference_server) < 4:
        assert time.monotonic() < deadline
    abort = pb.AbortRequest(request_ids=["aborted"])
    assert inference_server.inference.Abort(abort, timeout=60).aborted_calls == 2
    chunks, answer = list(stream), unary.result()
    ends = [chunk.finish.reason for chunk in chunks if chunk.HasField("finish")]
    assert ends == [each.finish.reason for each in answer.sequences] == [generation_pb2.FINISH_REASON_ABORT] * 2
    assert chunks[-1].usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in answer.sequences)
    assert running_requests(inference_server) == 0


def running_requests(server: InferenceProcess) -> int:
    load = server.models.GetLoad(model_service_pb2.GetLoadRequest(model="tiny"), timeout=60)
    return int(load.loads[0].running_requests)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["close", "cancel", "deadline", "abort", "abort_unary"])
def test_an_engine_forgets_a_request_whose_caller_leaves_or_aborts(
    how: str, n: int, left: dict[str, dict[str, object]]
) -> None:
    """Its own process has no work and no cache in use afterwards. Of an abort, the caller learns."""
    assert left[f"{how}-{n}"] == {
        "while_running": True,
        "after": False,
        "num_running": 0,
        "kv_cache_usage": 0,
        "remembered": 0,
        "ends": ["abort"] * n if how.startswith("abort") else [],
    }


def test_vllm_gets_the_options_of_a_request(left: dict[str, dict[str, object]]) -> None:
    """Each where it expects it."""
    assert left["options"] == {
        "priority": 3,
        "session_id": "session",
        "trace_headers": {"traceparent": "00-1-2-01"},
        "request_id": "mine",
        "lora_request": None,
        "cache_salt": "salt",
    }


@pytest.fixture(scope="module")
def left(inference_python: Path, tiny_checkpoint: Path) -> dict[str, dict[str, object]]:
    """What the engine core had to do before and after callers left, looked at from inside."""
    script = Path(__file__).parents[1] / "support/vllm_abort_check.py"
    run = subprocess.run(
        [inference_python, script, tiny_checkpoint], capture_output=True, text=True, timeout=240, check=True
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))
