"""ModelService over a socket: loading, watching and unloading, with a fake engine behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import inference_service_pb2, model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill_common.errors import FailedPreconditionError
from support.checkpoints import write_checkpoint
from support.fake_inference_engine import TEXT
from support.inference_artifacts import AMPERE, CPU, publish_artifact
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as server:
        yield server


async def watch(server: Serving, name: str = "tiny") -> list[tuple[int, int]]:
    """States and phases until the watch ends."""
    call = server.models.WatchModel(pb.WatchModelRequest(name=name), timeout=TIMEOUT_S)
    return [(response.model.state, response.model.phase) async for response in call]


async def load_in_background(server: Serving, name: str = "tiny") -> model_pb2.Model:
    request = pb.LoadModelRequest(name=name, uri=server.checkpoint_uri, return_immediately=True)
    return (await server.models.LoadModel(request)).model


async def failure_of(server: Serving, name: str = "tiny", uri: str = "", **options: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(name, uri, **options)
    return caught.value


async def test_a_checkpoint_directory_is_loaded_and_serves(server: Serving) -> None:
    """Everything about it is in the model, and the engine got its directory and options."""
    model = await server.load(max_model_len=32, enforce_eager=False)
    assert model == await server.get()
    assert (model.name, model.uri, model.digest) == ("tiny", server.checkpoint_uri, "")
    assert (model.state, model.phase) == (model_pb2.MODEL_STATE_SERVING, model_pb2.LOAD_PHASE_UNSPECIFIED)
    assert (model.max_model_len, model.quantization) == (32, "fake-quantization")
    assert model.engine_options == model_pb2.EngineOptions(max_model_len=32, enforce_eager=False)
    assert model.create_time.ToDatetime() <= model.serving_time.ToDatetime()
    assert server.engine.directory == server.checkpoint
    assert server.engine.options.enforce_eager is False
    assert server.engine.options.max_num_seqs is None


async def test_an_artifact_is_loaded_under_its_own_name(server: Serving) -> None:
    """With its digest, which every file was compared with."""
    uri = publish_artifact(server.root, server.checkpoint, name="milled", devices=[AMPERE, CPU])
    model = await server.load("", uri)
    assert (model.name, model.digest) == ("milled", f"sha256:{uri.rpartition('/')[2]}")
    assert model.state == model_pb2.MODEL_STATE_SERVING


async def test_a_directory_gives_its_name_in_lower_case(server: Serving) -> None:
    """A repository's usual name becomes a valid one."""
    checkpoint = write_checkpoint(server.checkpoint.parent / "SmolLM2 135M")
    assert (await server.load("", checkpoint.as_uri())).name == "smollm2-135m"


async def test_the_phases_of_a_load_are_watched_in_order(server: Serving) -> None:
    """From LOADING over SERVING and DRAINING to UNLOADED, which ends the watch."""
    server.engines.gate.clear()
    loading = await load_in_background(server)
    assert loading.state == model_pb2.MODEL_STATE_LOADING
    watching = asyncio.create_task(watch(server))
    second = asyncio.create_task(watch(server))
    await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
    server.engines.gate.set()
    await server.load()
    await server.unload()
    seen = await watching
    assert [state for state, _ in seen[-3:]] == [
        model_pb2.MODEL_STATE_SERVING,
        model_pb2.MODEL_STATE_DRAINING,
        model_pb2.MODEL_STATE_UNLOADED,
    ]
    phases = [phase for state, phase in seen if state == model_pb2.MODEL_STATE_LOADING]
    assert phases == sorted(phases)
    assert model_pb2.LOAD_PHASE_WARM_UP in phases
    assert (await second)[-1] == seen[-1]


async def test_a_watch_shows_every_phase_and_its_bytes(server: Serving) -> None:
    """An artifact is counted when it is fetched, which costs nothing here, and when it is hashed."""
    server.engines.failure = RuntimeError("no")
    await failure_of(server)
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"), timeout=TIMEOUT_S)
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_FAILED
    uri = publish_artifact(server.root, server.checkpoint)
    await server.load(uri=uri)
    size = sum(path.stat().st_size for path in server.checkpoint.rglob("*") if path.is_file())
    progress: dict[int, tuple[int, int]] = {}
    while (model := (await states.read()).model).state == model_pb2.MODEL_STATE_LOADING:
        progress[model.phase] = (model.load_progress.completed_bytes, model.load_progress.total_bytes)
    assert model.state == model_pb2.MODEL_STATE_SERVING
    assert not model.HasField("load_progress")
    assert progress == {
        model_pb2.LOAD_PHASE_RESOLVE: (0, 0),
        model_pb2.LOAD_PHASE_FETCH: (size, size),
        model_pb2.LOAD_PHASE_VERIFY: (size, size),
        model_pb2.LOAD_PHASE_START_ENGINE: (0, 0),
        model_pb2.LOAD_PHASE_WARM_UP: (0, 0),
    }


async def test_a_load_goes_on_when_its_caller_leaves(server: Serving) -> None:
    """The work is the server's; another call can wait for it."""
    server.engines.gate.clear()
    request = pb.LoadModelRequest(name="tiny", uri=server.checkpoint_uri)
    call = server.models.LoadModel(request)
    await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
    call.cancel()
    server.engines.gate.set()
    assert (await server.load()).state == model_pb2.MODEL_STATE_SERVING
    assert len(server.engines.started) == 1


async def test_equal_loads_share_one_engine(server: Serving) -> None:
    """At once and one after the other."""
    first, second = await asyncio.gather(server.load(max_num_seqs=4), server.load(max_num_seqs=4))
    assert first == second == await server.load(max_num_seqs=4)
    assert len(server.engines.started) == 1


async def test_a_name_that_is_taken_by_something_else_is_refused(server: Serving) -> None:
    """By other options, or by another URI."""
    await server.load()
    other = write_checkpoint(server.checkpoint.parent / "other")
    for failure in (await failure_of(server, max_num_seqs=4), await failure_of(server, uri=other.as_uri())):
        assert failure.code() == grpc.StatusCode.ALREADY_EXISTS
        assert error_info(failure).reason == "MODEL_EXISTS"
    assert (await server.get()).state == model_pb2.MODEL_STATE_SERVING


async def test_several_models_serve_side_by_side(server: Serving) -> None:
    """Each with an engine of its own; unloading one leaves the others."""
    await asyncio.gather(server.load("a"), server.load("b", max_num_seqs=2), server.load("c"))
    await server.unload("b")
    assert [model.name for model in await server.list()] == ["a", "c"]
    for name in ("a", "c"):
        request = inference_service_pb2.GenerateUnaryRequest(model=name, text="x")
        assert (await server.inference.GenerateUnary(request)).sequences[0].text == TEXT


async def test_models_are_listed_in_pages_by_name(server: Serving) -> None:
    """The token of one page leads to the next; a made-up one is refused."""
    for name in ("c", "a", "b"):
        await server.load(name)
    first = await server.models.ListModels(pb.ListModelsRequest(page_size=2))
    rest = await server.models.ListModels(pb.ListModelsRequest(page_size=2, page_token=first.next_page_token))
    assert [model.name for model in (*first.models, *rest.models)] == ["a", "b", "c"]
    assert rest.next_page_token == ""
    for token in ("?", "é", "////"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.models.ListModels(pb.ListModelsRequest(page_token=token))
        assert violations(caught.value) == {"page_token": "INVALID_PAGE_TOKEN"}


@pytest.mark.parametrize("name", ["Tiny", "a--b", "-a", "a/b", "a" * 64, "ä"])
async def test_a_name_that_breaks_the_rule_is_refused(name: str, server: Serving) -> None:
    """So are options that no engine takes; all are named at once."""
    failure = await failure_of(server, name, max_num_seqs=0, gpu_memory_utilization=1.5)
    assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(failure) == {
        "name": "INVALID_NAME",
        "engine_options.max_num_seqs": "OUT_OF_RANGE",
        "engine_options.gpu_memory_utilization": "OUT_OF_RANGE",
    }


@pytest.mark.parametrize(
    ("uri", "code", "reason"),
    [
        ("nonsense", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_URI"),
        ("http://example.com/model", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_URI"),
        ("file:///etc", grpc.StatusCode.PERMISSION_DENIED, "URI_OUTSIDE_ROOTS"),
    ],
)
async def test_a_uri_that_is_not_allowed_leaves_no_model(
    uri: str, code: grpc.StatusCode, reason: str, server: Serving
) -> None:
    """Nothing was opened, so there is nothing to list."""
    failure = await failure_of(server, uri=uri)
    assert (failure.code(), error_info(failure).reason) == (code, reason)
    assert await server.list() == []


async def test_a_device_that_cannot_serve_the_artifact_is_told_before_an_engine_starts(server: Serving) -> None:
    """FAILED_PRECONDITION names what is missing."""
    uri = publish_artifact(server.root, server.checkpoint, devices=[AMPERE])
    failure = await failure_of(server, uri=uri)
    assert (failure.code(), error_info(failure).reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "DEVICE_UNSUPPORTED",
    )
    assert error_info(failure).metadata["needed"] == "CUDA with compute capability 8.0 or higher"
    assert server.engines.started == []
    model = await server.get()
    assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_FAILED, "DEVICE_UNSUPPORTED")


async def test_a_file_that_differs_from_the_manifest_is_data_loss_and_nothing_is_loaded(server: Serving) -> None:
    """One flipped byte is enough, and its file is named."""
    uri = publish_artifact(server.root, server.checkpoint)
    weights = server.checkpoint.parent / uri.partition("/models/")[2] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    failure = await failure_of(server, uri=uri)
    assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.DATA_LOSS, "ARTIFACT_CORRUPT")
    assert "model.safetensors" in error_info(failure).metadata["files"]
    assert server.engines.started == []
    model = await server.get()
    assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_FAILED, "ARTIFACT_CORRUPT")
    assert not await server.is_serving()


async def test_a_half_written_artifact_is_not_found(server: Serving) -> None:
    """Its files lie there, but without a manifest it is no artifact, and no plain checkpoint either."""
    uri = publish_artifact(server.root, server.checkpoint, with_manifest=False)
    failure = await failure_of(server, uri=uri)
    assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.NOT_FOUND, "ARTIFACT_NOT_FOUND")
    assert server.engines.started == []


@pytest.mark.parametrize(
    ("missing", "reason"), [("config.json", "CONFIG_MISSING"), ("model.safetensors", "WEIGHTS_MISSING")]
)
async def test_a_checkpoint_that_cannot_be_used_is_told_before_an_engine_starts(
    missing: str, reason: str, server: Serving
) -> None:
    """FAILED_PRECONDITION with the reason of the inspection."""
    (server.checkpoint / missing).unlink()
    failure = await failure_of(server)
    assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert server.engines.started == []


async def test_a_model_that_failed_can_be_loaded_again_with_whatever(server: Serving) -> None:
    """A watch that began before goes on over it."""
    server.engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "no memory")
    failure = await failure_of(server, max_num_seqs=1)
    assert error_info(failure).reason == "ENGINE_START_FAILED"
    assert (await server.get()).error.message == "no memory"
    call = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    assert (await call.read()).model.state == model_pb2.MODEL_STATE_FAILED
    assert (await server.load(max_num_seqs=2)).state == model_pb2.MODEL_STATE_SERVING
    assert (await call.read()).model.state == model_pb2.MODEL_STATE_LOADING
    await server.unload()
    call.cancel()


async def test_a_crash_of_the_load_is_internal_and_the_model_does_not_stay_loading(server: Serving) -> None:
    """Its text stays in the log."""
    server.engines.failure = RuntimeError("secret")
    failure = await failure_of(server)
    assert failure.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in failure.details()
    assert (await server.get()).state == model_pb2.MODEL_STATE_FAILED


async def test_calls_to_a_loading_model_are_unavailable(server: Serving) -> None:
    """With the model's state as the reason and a hint to try again."""
    server.engines.gate.clear()
    await load_in_background(server)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.GenerateUnary(inference_service_pb2.GenerateUnaryRequest(model="tiny", text="x"))
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
    assert not await server.is_serving()
    server.engines.gate.set()


async def test_unloading_finishes_the_running_calls_and_refuses_new_ones(server: Serving) -> None:
    """The engine stops only when the last call has its whole answer."""
    await server.load()
    engine = server.engine
    engine.gate.clear()
    stream = server.inference.Generate(inference_service_pb2.GenerateRequest(text="x"))
    text = (await stream.read()).text
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    unloading = asyncio.create_task(server.unload())
    assert (await states.read()).model.state == model_pb2.MODEL_STATE_DRAINING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.GenerateUnary(inference_service_pb2.GenerateUnaryRequest(model="tiny", text="x"))
    assert error_info(caught.value).reason == "MODEL_DRAINING"
    assert not engine.stopped
    engine.gate.set()
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        text += chunk.text
    await unloading
    assert text == TEXT
    assert engine.stopped
    assert await server.list() == []


async def test_a_loading_model_can_be_unloaded(server: Serving) -> None:
    """Whoever waited for it is told."""
    server.engines.gate.clear()
    await load_in_background(server)
    waiting = asyncio.create_task(failure_of(server))
    await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
    await server.unload()
    assert (await waiting).code() == grpc.StatusCode.UNAVAILABLE
    assert await server.list() == []


@pytest.mark.parametrize("method", ["GetModel", "UnloadModel", "WatchModel"])
async def test_an_unknown_model_is_not_found(method: str, server: Serving) -> None:
    """By every call that names one."""
    request = getattr(pb, f"{method}Request")(name="nope")
    call = getattr(server.models, method)(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method == "WatchModel" else call)
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_a_drain_gives_loads_up_and_ends_watches(server: Serving) -> None:
    """Both would otherwise take the whole grace; their callers may turn to another server."""
    server.engines.gate.clear()
    loading = asyncio.create_task(failure_of(server))
    await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
    states = server.models.WatchModel(pb.WatchModelRequest(name="tiny"))
    await states.read()
    server.registry.begin_stopping()
    with pytest.raises(grpc.aio.AioRpcError) as watching:
        await states.read()
    for failure in (await loading, watching.value):
        assert (failure.code(), error_info(failure).reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")
