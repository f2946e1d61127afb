"""Adapters over a socket: loaded, named by calls, unloaded, with a fake engine behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2, inference_service_pb2, model_pb2
from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill_common.errors import FailedPreconditionError
from bitmill_common.stores import Stores
from support.adapters import MODULES, adapter_digest, write_adapter
from support.fake_inference_engine import FakeEngine
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations
from support.object_stores import S3Server, run_s3_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with a model that takes adapters."""
    async with serving(tmp_path) as server:
        await server.load(enable_lora=True)
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An adapter of that model, inside its roots."""
    return write_adapter(tmp_path / "models" / "style")


async def load(server: Serving, directory: Path | str, name: str = "", digest: str = "") -> model_pb2.Adapter:
    uri = directory if isinstance(directory, str) else directory.as_uri()
    request = pb.LoadAdapterRequest(name=name, uri=uri, digest=digest)
    return (await server.models.LoadAdapter(request, timeout=TIMEOUT_S)).adapter


async def unload(server: Serving, name: str) -> None:
    await server.models.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=TIMEOUT_S)


def request(adapter: str) -> inference_service_pb2.GenerateRequest:
    options = generation_pb2.RequestOptions(adapter=adapter)
    return inference_service_pb2.GenerateRequest(text="a", request_options=options)


def stream(server: Serving, adapter: str) -> grpc.aio.UnaryStreamCall:
    return server.inference.Generate(request(adapter), timeout=TIMEOUT_S)


async def adapters(server: Serving) -> dict[str, int]:
    """Running calls by adapter, as GetModel has them."""
    return {adapter.name: adapter.running_calls for adapter in (await server.get()).adapters}


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def refusal(server: Serving, directory: Path, name: str = "") -> tuple[grpc.StatusCode, str]:
    error = await failure(load(server, directory, name))
    return error.code(), error_info(error).reason


async def test_an_adapter_is_loaded_and_named_by_calls(server: Serving, directory: Path) -> None:
    """Under its directory's name; the engine gets a copy of its two files, and it with each request that names it."""
    (directory / "training_args.bin").write_bytes(b"pickle")
    adapter = await load(server, directory)
    digest = adapter.digest
    (directory / "training_args.bin").unlink()
    assert (adapter.name, adapter.uri, digest) == ("style", directory.as_uri(), adapter_digest(directory))
    assert (adapter.rank, adapter.running_calls) == (4, 0)
    assert adapter.load_time.seconds > 0
    assert list((await server.get()).adapters) == [adapter]
    (local,) = server.engine.adapters.values()
    assert (local.name, local.rank) == ("style", 4)
    assert adapter_digest(local.directory) == digest
    assert not local.directory.is_relative_to(directory)
    assert [chunk async for chunk in stream(server, "style")]
    assert [chunk async for chunk in stream(server, "")]
    assert [request.adapter for request in server.engine.requests[-2:]] == [local, None]


async def test_a_digest_that_is_not_that_of_the_files_is_data_loss(server: Serving, directory: Path) -> None:
    """With both; the engine does not see it. The right one loads."""
    error = await failure(load(server, directory, digest="sha256:" + "0" * 64))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.DATA_LOSS, "ADAPTER_DIGEST_MISMATCH")
    metadata = error_info(error).metadata
    assert (metadata["digest"], metadata["expected_digest"]) == (adapter_digest(directory), "sha256:" + "0" * 64)
    assert server.engine.adapters == {}
    assert await adapters(server) == {}
    assert (await load(server, directory, digest=adapter_digest(directory))).name == "style"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "IA3"}, "ADAPTER_UNSUPPORTED"),
        ({"use_dora": True}, "ADAPTER_UNSUPPORTED"),
        ({"bias": "lora_only"}, "ADAPTER_UNSUPPORTED"),
        ({"lora_bias": True}, "ADAPTER_UNSUPPORTED"),
        ({"modules_to_save": ["lm_head"]}, "ADAPTER_UNSUPPORTED"),
        ({"init_lora_weights": "pissa"}, "ADAPTER_UNSUPPORTED"),
        ({"r": 17}, "ADAPTER_RANK_TOO_HIGH"),
        ({"rank_pattern": {"q_proj": 17}}, "ADAPTER_RANK_TOO_HIGH"),
        ({"r": 2}, "ADAPTER_INCOMPATIBLE"),
        ({"r": "four"}, "ADAPTER_INVALID"),
        ({"lora_alpha": None}, "ADAPTER_INVALID"),
    ],
)
async def test_an_adapter_of_another_kind_is_refused_before_the_engine_sees_it(
    change: dict[str, object], reason: str, server: Serving, tmp_path: Path
) -> None:
    """FAILED_PRECONDITION; nothing is left of it."""
    directory = write_adapter(tmp_path / "models" / "other", config=change)
    assert await refusal(server, directory) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert server.engine.adapters == {}
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


async def test_an_adapter_of_another_model_is_refused_with_every_problem(server: Serving, tmp_path: Path) -> None:
    """Modules that the model lacks, and sizes that are not the model's; smaller ones too, which would be padded."""
    modules = {
        "model.layers.0.self_attn.q_proj": (32, 64),
        "model.layers.0.self_attn.v_proj": (64, 64),
        "model.layers.7.mlp.up_proj": (64, 128),
        "model.layers.0.attention.wq": (64, 64),
    }
    directory = write_adapter(tmp_path / "models" / "foreign", modules)
    error = await failure(load(server, directory))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_INCOMPATIBLE")
    for module in modules:
        assert module in error.details()
    assert "from 32 to 64, the model's from 64 to 64" in error_info(error).metadata["problems"]
    assert server.engine.adapters == {}


def break_weights(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def leave_pickle(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (break_weights, "ADAPTER_INVALID"),
        (leave_pickle, "PICKLE_ONLY"),
        (lambda directory: (directory / "adapter_model.safetensors").unlink(), "ADAPTER_FILES_MISSING"),
        (lambda directory: (directory / "adapter_config.json").unlink(), "ADAPTER_FILES_MISSING"),
        (lambda directory: (directory / "adapter_config.json").write_text("[]"), "ADAPTER_INVALID"),
        (lambda directory: (directory / "adapter_config.json").write_text("{"), "ADAPTER_INVALID"),
    ],
)
async def test_a_directory_that_is_no_adapter_is_refused(
    spoil: Callable[[Path], object], reason: str, server: Serving, directory: Path
) -> None:
    """FAILED_PRECONDITION saying what is missing or wrong."""
    spoil(directory)
    error = await failure(load(server, directory))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert directory.as_uri() in error.details()


async def test_an_adapter_that_the_engine_refuses_is_gone(server: Serving, directory: Path, tmp_path: Path) -> None:
    """With the engine's words; the name is free again."""
    server.engine.adapter_failure = FailedPreconditionError("ADAPTER_REFUSED", "vLLM does not take it: no")
    assert await refusal(server, directory) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_REFUSED")
    assert await adapters(server) == {}
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []
    server.engine.adapter_failure = None
    assert (await load(server, directory)).name == "style"


async def test_wrong_fields_are_named_at_once(server: Serving, directory: Path) -> None:
    """The name, which also must not be the model's, and the digest; a URI outside the roots is no field's fault."""
    error = await failure(load(server, directory, "Not A Name", "sha256:12"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {"name": "INVALID_NAME", "digest": "INVALID_DIGEST"}
    assert violations(await failure(load(server, directory, "tiny"))) == {"name": "NAME_OF_MODEL"}
    assert (await failure(load(server, "file:///elsewhere/style"))).code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_model_without_lora_takes_no_adapter(tmp_path: Path, directory: Path) -> None:
    """FAILED_PRECONDITION; a call that names one is NOT_FOUND."""
    async with serving(tmp_path) as server:
        await server.load()
        assert await refusal(server, directory) == (grpc.StatusCode.FAILED_PRECONDITION, "LORA_NOT_ENABLED")
        error = await failure(server.inference.GenerateUnary(unary("style")))
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")


def unary(adapter: str) -> inference_service_pb2.GenerateUnaryRequest:
    return inference_service_pb2.GenerateUnaryRequest(text="a", request_options=request(adapter).request_options)


async def test_an_adapter_that_is_not_loaded_is_not_found(server: Serving, directory: Path) -> None:
    """By streams, unary calls and UnloadAdapter alike, naming those that are."""
    await load(server, directory)
    calls = [
        server.inference.GenerateUnary(unary("other")),
        stream(server, "other").read(),
        unload(server, "other"),
    ]
    for call in calls:
        error = await failure(call)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert error_info(error).metadata["adapters"] == "style"


async def test_the_same_adapter_again_is_no_error_and_another_one_is(
    server: Serving, directory: Path, tmp_path: Path
) -> None:
    """Same by digest, wherever it lies; the engine learns of it once."""
    first = await load(server, directory)
    same = write_adapter(tmp_path / "models" / "copy")
    other = write_adapter(tmp_path / "models" / "other", seed=1)
    assert await load(server, directory) == await load(server, same, "style") == first
    assert await load(server, other, "style", first.digest) == first
    for digest in ("", adapter_digest(other)):
        error = await failure(load(server, other, "style", digest))
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")
        assert error_info(error).metadata["digest"] == first.digest
    assert len(server.engine.adapters) == 1
    assert len(list((tmp_path / "cache" / "downloads").iterdir())) == 1


class SlowAdapters:
    """Lets the engine take adapters only once `gate` is open."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        add = engine.add_adapter

        async def slow(adapter: object) -> None:
            self.asked += 1
            self.begun.set()
            await self.gate.wait()
            await add(adapter)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "add_adapter", slow)


async def test_two_loads_of_one_adapter_at_once_are_one(
    server: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the first; it goes on when its caller leaves, and calls wait for no load."""
    slow = SlowAdapters(server.engine, monkeypatch)
    first = asyncio.create_task(load(server, directory))
    await asyncio.wait_for(slow.begun.wait(), TIMEOUT_S)
    second = asyncio.create_task(load(server, directory))
    error = await failure(server.inference.GenerateUnary(unary("style")))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_LOADING")
    first.cancel()
    slow.gate.set()
    assert (await second).name == "style"
    assert slow.asked == 1
    assert await adapters(server) == {"style": 0}


async def test_an_adapter_in_use_is_unloaded_when_its_calls_have_ended(
    server: Serving, directory: Path, tmp_path: Path
) -> None:
    """New calls with it are refused meanwhile; others are not, and it goes on when the caller leaves."""
    await load(server, directory)
    server.engine.gate.clear()
    running = aiter(stream(server, "style"))
    await anext(running)
    assert await adapters(server) == {"style": 1}
    # Not over the socket: it is draining as soon as the task has begun.
    unloading = asyncio.create_task(server.registry.unload_adapter("tiny", "style"))
    await asyncio.sleep(0)
    for call in (stream(server, "style").read(), server.inference.GenerateUnary(unary("style"))):
        error = await failure(call)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_DRAINING")
    assert (await failure(load(server, directory))).code() == grpc.StatusCode.UNAVAILABLE
    unloading.cancel()
    joined = asyncio.create_task(server.registry.unload_adapter("tiny", "style"))
    await asyncio.sleep(0)
    assert len(server.engine.adapters) == 1
    server.engine.gate.set()
    assert [chunk async for chunk in running]
    await joined
    assert server.engine.adapters == {}
    assert await adapters(server) == {}
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


async def test_a_name_may_come_back_with_other_files(server: Serving, directory: Path, tmp_path: Path) -> None:
    """Under an id that the engine has not seen: it keeps what it computed by id and path."""
    await load(server, directory)
    (before,) = server.engine.adapters.values()
    await unload(server, "style")
    await load(server, write_adapter(tmp_path / "models" / "other", seed=1), "style")
    (after,) = server.engine.adapters.values()
    assert after.name == before.name
    assert after.adapter_id != before.adapter_id
    assert after.directory != before.directory


async def test_adapters_survive_a_restart_of_the_engine(server: Serving, directory: Path) -> None:
    """The new engine has them before a call comes."""
    adapter = await load(server, directory)
    dead = server.engine
    watching = server.models.WatchModel(pb.WatchModelRequest(name="tiny"), timeout=TIMEOUT_S)
    dead.die()
    async for response in watching:
        if response.model.restarts and response.model.state == model_pb2.MODEL_STATE_SERVING:
            break
    assert server.engine is not dead
    assert server.engine.adapters == dead.adapters
    assert list((await server.get()).adapters) == [adapter]
    assert [chunk async for chunk in stream(server, "style")]


async def test_adapters_go_with_their_model(server: Serving, directory: Path, tmp_path: Path) -> None:
    """Their copies too."""
    await load(server, directory)
    await server.unload()
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []
    await server.load(enable_lora=True)
    assert await adapters(server) == {}


async def test_a_load_is_given_up_with_its_model(
    server: Serving, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller learns so, and nothing is left."""
    slow = SlowAdapters(server.engine, monkeypatch)
    loading = asyncio.create_task(load(server, directory))
    await asyncio.wait_for(slow.begun.wait(), TIMEOUT_S)
    await server.unload()
    error = await failure(loading)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


async def test_an_adapter_comes_from_a_remote_store(tmp_path: Path, s3: S3Server) -> None:
    """Its two files alone."""
    uri = f"s3://{s3.create_bucket()}"
    bucket = Stores([uri], s3.options).open(uri, "uri")
    directory = write_adapter(tmp_path / "here" / "style")
    for path in directory.iterdir():
        bucket.write(f"loras/style/{path.name}", path.read_bytes())
    bucket.write("loras/style/optimizer.pt", b"pickle")
    async with serving(tmp_path, roots=(uri,), options=s3.options) as server:
        await server.load(enable_lora=True)
        adapter = await load(server, f"{uri}/loras/style")
        assert (adapter.uri, adapter.digest) == (f"{uri}/loras/style", adapter_digest(directory))
        assert await adapters(server) == {"style": 0}


async def test_modules_may_be_fewer_than_the_model_has(server: Serving, tmp_path: Path) -> None:
    """And the head of a model that ties it to its embedding may be among them."""
    modules = {"lm_head": (64, 256), "model.layers.1.mlp.down_proj": MODULES["model.layers.1.mlp.down_proj"]}
    assert (await load(server, write_adapter(tmp_path / "models" / "head", modules))).name == "head"
