"""Models from a remote store: moto's S3 over HTTP, a fake engine behind the port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import model_pb2
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from support.inference_artifacts import publish_artifact
from support.inference_serving import Serving, error_info, serving
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
    assert list((tmp_path / "cache" / "checkpoints").iterdir()) == []
