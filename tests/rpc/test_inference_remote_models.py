"""Models from a remote store: moto's S3 over HTTP, a fake engine behind the port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import model_pb2, model_service_pb2
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from bitmill_inference.artifacts.artifact_cache import ArtifactCache
from bitmill_inference.artifacts.file_lock import FileLock
from support.checkpoints import write_checkpoint
from support.inference_artifacts import publish_artifact
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving
from support.object_stores import S3Server, run_s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> ObjectStore:
    """An empty bucket that the server may load from."""
    uri = f"s3://{s3.create_bucket()}"
    return Stores([uri], s3.options).open(uri, "uri")


@pytest.fixture
async def server(tmp_path: Path, s3: S3Server, bucket: ObjectStore) -> AsyncIterator[Serving]:
    async with serving(tmp_path, roots=(bucket.uri,), options=s3.options) as server:
        yield server


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "manifest.json"}


async def test_an_artifact_is_kept_in_the_cache_by_its_digest(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """The second load takes it from there: the store may be empty by then, the manifest left out."""
    uri = publish_artifact(bucket, server.checkpoint)
    model = await server.load(uri=uri)
    cached = tmp_path / "cache" / "artifacts" / model.digest.removeprefix("sha256:")
    assert server.engine.directory == cached
    assert files(cached) == files(server.checkpoint)
    await server.unload()
    for info in list(bucket.list()):
        if not info.path.endswith("manifest.json"):
            bucket.delete(info.path)
    assert (await server.load(uri=uri)).state == model_pb2.MODEL_STATE_SERVING
    assert server.engine.directory == cached


async def test_a_cached_copy_that_was_damaged_is_data_loss_once(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """It is thrown away, so that the next load fetches the artifact again."""
    uri = publish_artifact(bucket, server.checkpoint)
    model = await server.load(uri=uri)
    await server.unload()
    cached = tmp_path / "cache" / "artifacts" / model.digest.removeprefix("sha256:")
    (cached / "config.json").write_text("{}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(uri=uri)
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.DATA_LOSS, "ARTIFACT_CORRUPT")
    assert (await server.load(uri=uri)).state == model_pb2.MODEL_STATE_SERVING
    assert files(cached) == files(server.checkpoint)


async def test_a_damaged_artifact_is_data_loss_and_leaves_nothing_in_the_cache(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """No engine starts on it."""
    uri = publish_artifact(bucket, server.checkpoint)
    path = uri.removeprefix(f"{bucket.uri}/")
    bucket.write(f"{path}/config.json", b"{}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(uri=uri)
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.DATA_LOSS, "ARTIFACT_CORRUPT")
    assert server.engines.started == []
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


async def test_a_plain_checkpoint_is_fetched_for_its_load_alone(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """What is no part of the checkpoint stays behind; the copy goes with the model."""
    for name, data in files(server.checkpoint).items():
        bucket.write(f"plain/{name}", data)
    bucket.write("plain/modeling_evil.py", b"raise SystemExit")
    model = await server.load(uri=f"{bucket.uri}/plain")
    assert (model.state, model.digest) == (model_pb2.MODEL_STATE_SERVING, "")
    assert files(server.engine.directory) == files(server.checkpoint)
    await server.unload()
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


@asynccontextmanager
async def bounded(tmp_path: Path, s3: S3Server, bucket: ObjectStore, max_bytes: int) -> AsyncIterator[Serving]:
    """A server whose cache holds at most so much."""
    cache = ArtifactCache(tmp_path / "cache", max_bytes)
    async with serving(tmp_path, roots=(bucket.uri,), options=s3.options, cache=cache) as server:
        yield server


def artifacts_in(cache: Path) -> set[str]:
    return {f"sha256:{path.name}" for path in (cache / "artifacts").iterdir()}


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def test_an_artifact_that_no_model_uses_makes_room(tmp_path: Path, s3: S3Server, bucket: ObjectStore) -> None:
    """One that is loaded does not: then the next load is refused with numbers, before a byte is fetched."""
    checkpoints = [write_checkpoint(tmp_path / f"checkpoint-{seed}", seed=seed) for seed in range(3)]
    uris = [publish_artifact(bucket, checkpoint, name=f"m{n}") for n, checkpoint in enumerate(checkpoints)]
    size = size_of(checkpoints[0])
    async with bounded(tmp_path, s3, bucket, 2 * size + 100) as server:
        digests = [(await server.load(f"m{n}", uris[n])).digest for n in range(2)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.load("m2", uris[2])
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_info(caught.value)
        assert (info.reason, info.metadata["size_bytes"]) == ("CACHE_FULL", str(size_of(checkpoints[2])))
        assert info.metadata["cache_max_bytes"] == str(2 * size + 100)
        assert artifacts_in(tmp_path / "cache") == set(digests)
        await server.unload("m0")
        last = (await server.load("m2", uris[2])).digest
        assert artifacts_in(tmp_path / "cache") == {digests[1], last}


async def test_an_artifact_larger_than_the_cache_is_refused(tmp_path: Path, s3: S3Server, bucket: ObjectStore) -> None:
    """RESOURCE_EXHAUSTED with both sizes; the model shows it too."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    uri = publish_artifact(bucket, checkpoint)
    async with bounded(tmp_path, s3, bucket, 1000) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.load(uri=uri)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(caught.value).reason == "CACHE_TOO_SMALL"
        model = await server.get()
        assert (model.error.reason, model.error.metadata["cache_max_bytes"]) == ("CACHE_TOO_SMALL", "1000")
        assert model.error.metadata["size_bytes"] == str(size_of(checkpoint))
        assert server.engines.started == []


async def test_two_servers_share_one_cache(tmp_path: Path, s3: S3Server, bucket: ObjectStore) -> None:
    """What one fetched the other finds, and neither evicts what the other uses."""
    checkpoints = [write_checkpoint(tmp_path / f"checkpoint-{seed}", seed=seed) for seed in range(2)]
    uris = [publish_artifact(bucket, checkpoint, name=f"m{n}") for n, checkpoint in enumerate(checkpoints)]
    size = size_of(checkpoints[0])
    async with bounded(tmp_path, s3, bucket, size + 100) as one, bounded(tmp_path, s3, bucket, size + 100) as other:
        await one.load("m0", uris[0])
        await other.load("m0", uris[0])
        assert one.engine.directory == other.engine.directory
        await one.unload("m0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.load("m1", uris[1])
        assert error_info(caught.value).reason == "CACHE_FULL"
        await other.unload("m0")
        assert (await one.load("m1", uris[1])).state == model_pb2.MODEL_STATE_SERVING


async def test_a_load_that_waits_for_another_servers_download_can_be_unloaded(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """No thread of it is left waiting; the other's download is not disturbed."""
    uri = publish_artifact(bucket, server.checkpoint)
    downloading, proceed = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        downloading.set()
        assert proceed.wait(TIMEOUT_S)
        directory.mkdir()

    other = ArtifactCache(tmp_path / "cache")
    digest = f"sha256:{uri.rpartition('/')[2]}"
    holding = asyncio.create_task(asyncio.to_thread(other.hold, digest, 1, slow, lambda count: None))
    assert await asyncio.to_thread(downloading.wait, TIMEOUT_S)
    request = model_service_pb2.LoadModelRequest(name="tiny", uri=uri, return_immediately=True)
    await server.models.LoadModel(request)
    async for response in server.models.WatchModel(model_service_pb2.WatchModelRequest(name="tiny")):
        if response.model.phase == model_pb2.LOAD_PHASE_FETCH:
            break
    await server.unload()
    assert await server.list() == []
    proceed.set()
    (await holding).release()


async def test_a_watcher_sees_how_far_fetch_and_verify_are(
    server: Serving, bucket: ObjectStore, tmp_path: Path
) -> None:
    """Up to all bytes of all, whether they are read now or were before."""
    uri = publish_artifact(bucket, server.checkpoint)
    size = size_of(server.checkpoint)
    locks = tmp_path / "cache" / "locks"
    locks.mkdir(parents=True)
    for _ in range(2):
        # Somebody evicts the entry, it seems: the load waits until the watch has begun.
        lock = FileLock.try_acquire(locks / f"{uri.rpartition('/')[2]}.lock")
        assert lock is not None
        request = model_service_pb2.LoadModelRequest(name="tiny", uri=uri, return_immediately=True)
        await server.models.LoadModel(request)
        last: dict[int, tuple[int, int]] = {}
        async for response in server.models.WatchModel(model_service_pb2.WatchModelRequest(name="tiny")):
            lock.release()
            if response.model.state == model_pb2.MODEL_STATE_SERVING:
                break
            progress = response.model.load_progress
            last[response.model.phase] = (progress.completed_bytes, progress.total_bytes)
        assert last[model_pb2.LOAD_PHASE_FETCH] == last[model_pb2.LOAD_PHASE_VERIFY] == (size, size)
        await server.unload()
