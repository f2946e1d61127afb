"""What is verified, and when it is read again: files that were compared with their digest once are trusted until they
change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bitmill_common.errors import BitmillError, CancelledError, DataLossError
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from bitmill_inference.artifacts.artifact_cache import ArtifactCache
from bitmill_inference.artifacts.artifact_source import ArtifactSource, LocalModel, Source
from support.checkpoints import write_checkpoint
from support.inference_artifacts import publish_artifact


class ReadingStore:
    """A store on the local disk that counts the files it reads; `remote`: it says that they lie elsewhere."""

    def __init__(self, store: ObjectStore, remote: bool = False) -> None:
        self._store = store
        self._remote = remote
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def local_path(self, path: str = "") -> Path | None:
        return None if self._remote else self._store.local_path(path)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        self.reads.append(path)
        return self._store.read_chunks(path)


class Progress:
    """Adds up what `on_bytes` is told."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, count: int) -> None:
        self.total += count


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores([(tmp_path / "models").as_uri()])


@pytest.fixture
def artifact(tmp_path: Path, stores: Stores) -> ReadingStore:
    """An artifact on the local disk."""
    root = stores.open((tmp_path / "models").as_uri(), "uri")
    uri = publish_artifact(root, write_checkpoint(tmp_path / "checkpoint"))
    return ReadingStore(stores.open(uri, "uri"))


@pytest.fixture
def source(tmp_path: Path, stores: Stores) -> ArtifactSource:
    return ArtifactSource(stores, ArtifactCache(tmp_path / "cache"))


def load(source: ArtifactSource, artifact: ReadingStore) -> LocalModel:
    """Fetches and verifies; both report every byte."""
    resolved = source.resolve(artifact)  # type: ignore[arg-type]
    fetched, verified = Progress(), Progress()
    local = source.fetch(resolved, fetched)
    source.verify(resolved, local, verified)
    assert fetched.total == verified.total == resolved.size_bytes > 0
    return local


def test_an_artifact_on_the_local_disk_is_read_once(
    source: ArtifactSource, artifact: ReadingStore, stores: Stores, tmp_path: Path
) -> None:
    """Also by the next server process on the same cache directory."""
    local = load(source, artifact)
    assert sorted(artifact.reads) == sorted(info.path for info in artifact.list() if info.path != "manifest.json")
    artifact.reads.clear()
    load(source, artifact)
    load(ArtifactSource(stores, ArtifactCache(tmp_path / "cache")), artifact)
    assert artifact.reads == []
    assert local.directory == artifact.local_path()


def change_bytes(directory: Path) -> None:
    """Same size and same time of the last change, as careful tools leave them."""
    weights = directory / "model.safetensors"
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_file(directory: Path) -> None:
    weights = directory / "model.safetensors"
    status = weights.stat()
    data = weights.read_bytes()
    weights.rename(directory.parent / "old")
    weights.write_bytes(data[:-1] + b"\xff")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def add_file(directory: Path) -> None:
    (directory / "added.json").write_text("{}")


def remove_file(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize("change", [change_bytes, replace_file, add_file, remove_file])
def test_a_changed_artifact_is_data_loss_after_it_was_verified(
    change: Callable[[Path], None], source: ArtifactSource, artifact: ReadingStore
) -> None:
    """However it was changed."""
    local = load(source, artifact)
    change(local.directory)
    resolved = source.resolve(artifact)  # type: ignore[arg-type]
    with pytest.raises(DataLossError) as caught:
        source.verify(resolved, source.fetch(resolved, Progress()), Progress())
    assert caught.value.reason == "ARTIFACT_CORRUPT"


def test_a_touched_artifact_is_read_again(source: ArtifactSource, artifact: ReadingStore) -> None:
    """Whole files, and trusted again after that."""
    local = load(source, artifact)
    artifact.reads.clear()
    (local.directory / "config.json").touch()
    load(source, artifact)
    assert "model.safetensors" in artifact.reads
    artifact.reads.clear()
    load(source, artifact)
    assert artifact.reads == []


def test_a_file_that_changes_while_it_is_read_is_not_trusted(source: ArtifactSource, artifact: ReadingStore) -> None:
    """It is read again by the next load."""
    resolved = source.resolve(artifact)  # type: ignore[arg-type]
    local = source.fetch(resolved, Progress())
    source.verify(resolved, local, lambda count: (local.directory / "config.json").touch())
    artifact.reads.clear()
    load(source, artifact)
    assert "config.json" in artifact.reads


def test_a_download_is_hashed_as_it_comes_and_not_read_again(
    source: ArtifactSource, artifact: ReadingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by the next loads, which take it from the cache."""
    artifact = ReadingStore(artifact, remote=True)  # type: ignore[arg-type]
    opened: list[ReadingStore] = []
    local_store = source._local_store
    monkeypatch.setattr(
        source, "_local_store", lambda path: opened.append(ReadingStore(local_store(path))) or opened[-1]
    )
    load(source, artifact).release()
    load(source, artifact).release()
    assert [store.reads for store in opened] == [[], []]
    assert artifact.reads.count("model.safetensors") == 1


def test_a_damaged_copy_in_the_cache_is_fetched_again(source: ArtifactSource, artifact: ReadingStore) -> None:
    """By the load after the one that found the damage."""
    artifact = ReadingStore(artifact, remote=True)  # type: ignore[arg-type]
    local = load(source, artifact)
    local.release()
    change_bytes(local.directory)
    resolved = source.resolve(artifact)  # type: ignore[arg-type]
    with pytest.raises(DataLossError):
        source.verify(resolved, source.fetch(resolved, Progress()), Progress())
    load(source, artifact).release()
    assert artifact.reads.count("model.safetensors") == 2


@pytest.mark.parametrize("remote", [False, True])
def test_a_cache_directory_that_cannot_be_written_costs_stamps_alone(
    remote: bool, stores: Stores, artifact: ReadingStore, tmp_path: Path
) -> None:
    """Artifacts on the local disk load without; they are read each time."""
    (tmp_path / "file").write_text("")
    source = ArtifactSource(stores, ArtifactCache(tmp_path / "file"))
    source.sweep()
    if remote:
        with pytest.raises(BitmillError) as caught:
            load(source, ReadingStore(artifact, remote=True))  # type: ignore[arg-type]
        assert caught.value.reason == "CACHE_UNUSABLE"
        return
    load(source, artifact)
    artifact.reads.clear()
    load(source, artifact)
    assert "model.safetensors" in artifact.reads


def test_stamps_of_directories_that_are_gone_are_swept(
    source: ArtifactSource, artifact: ReadingStore, tmp_path: Path
) -> None:
    """The others stay."""
    local = load(source, artifact)
    stamps = tmp_path / "cache" / "stamps"
    source.sweep()
    assert len(list(stamps.iterdir())) == 1
    local.directory.rename(tmp_path / "moved")
    source.sweep()
    assert list(stamps.iterdir()) == []


@pytest.mark.parametrize("stamp", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"directory": "\\u0000"}', None])
def test_stamps_that_are_none_are_swept_or_left(
    stamp: bytes | None, source: ArtifactSource, artifact: ReadingStore, tmp_path: Path
) -> None:
    """The server starts, and what they are about is read again; None is a directory, which cannot be removed so."""
    path = tmp_path / "cache/stamps/x.json"
    path.parent.mkdir(parents=True)
    if stamp is None:
        path.mkdir()
    else:
        path.write_bytes(stamp)
    source.sweep()
    assert path.exists() is (stamp is None)


def test_a_fetch_that_is_given_up_holds_nothing(source: ArtifactSource, artifact: ReadingStore) -> None:
    """The entry may be evicted afterwards."""
    artifact = ReadingStore(artifact, remote=True)  # type: ignore[arg-type]
    load(source, artifact).release()
    resolved: Source = source.resolve(artifact)  # type: ignore[arg-type]

    def give_up(count: int) -> None:
        raise CancelledError("LOAD_GIVEN_UP", "given up")

    with pytest.raises(CancelledError):
        source.fetch(resolved, give_up)
    bounded = ArtifactCache(source._cache.directory, resolved.size_bytes)
    bounded.hold("sha256:" + "1" * 64, 1, lambda directory: directory.mkdir(), lambda count: None).release()
    assert [path.name for path in (bounded.directory / "artifacts").iterdir()] == ["1" * 64]
