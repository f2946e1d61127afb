"""Artifacts are published whole, listed in order, verified and fetched, in every kind of store."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bitmill_common.artifact import ArtifactFile, Manifest
from bitmill_common.artifacts import (
    MANIFEST_NAME,
    FileFault,
    FileFaultKind,
    artifact_path,
    describe_files,
    download_files,
    list_manifests,
    publish_manifest,
    read_manifest,
    require_intact,
    upload_files,
    verify_files,
)
from bitmill_common.errors import DataLossError, FailedPreconditionError, NotFoundError
from bitmill_common.manifest import content_digest, to_json
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_common.stores import Stores
from support.manifests import make_manifest

FILES = {"config.json": b"{}", "model.safetensors": os.urandom(9 * 2**20), "tokenizer/ü.json": b"[]", "empty": b""}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_files(tmp_path / "model", FILES)


@pytest.fixture
def published(root: ObjectStore, stores: Stores, model_dir: Path) -> tuple[ObjectStore, Manifest]:
    """An artifact of FILES and the store rooted at it."""
    uri, manifest = publish(root, model_dir, "smollm")
    return stores.open(uri, "uri"), manifest


def write_files(directory: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


def publish(root: ObjectStore, model_dir: Path, name: str) -> tuple[str, Manifest]:
    files = describe_files(model_dir)
    manifest = make_manifest(name=name, files=files)
    upload_files(root, artifact_path(name, manifest.digest), model_dir, files)
    return publish_manifest(root, manifest), manifest


def test_a_published_artifact_is_read_back_whole(
    root: ObjectStore, published: tuple[ObjectStore, Manifest], tmp_path: Path
) -> None:
    store, manifest = published
    assert store.uri == f"{root.uri}/artifacts/smollm/{manifest.digest.removeprefix('sha256:')}"
    assert read_manifest(store) == manifest
    assert list(list_manifests(root)) == [(store.uri, manifest)]
    assert verify_files(store, manifest) == []
    require_intact(store, manifest)

    target = tmp_path / "fetched"
    counts: list[int] = []
    download_files(store, manifest, target, counts.append)
    assert {path: (target / path).read_bytes() for path in FILES} == FILES
    assert sum(counts) == manifest.size_bytes


def test_files_without_a_manifest_are_no_artifact(root: ObjectStore, stores: Stores, model_dir: Path) -> None:
    files = describe_files(model_dir)
    path = artifact_path("smollm", content_digest(files))
    upload_files(root, path, model_dir, files)
    assert list(list_manifests(root)) == []
    store = stores.open(f"{root.uri}/{path}", "uri")
    with pytest.raises(NotFoundError) as raised:
        read_manifest(store)
    assert raised.value.reason == "ARTIFACT_NOT_FOUND"
    assert raised.value.metadata["uri"] == store.uri


def test_artifacts_are_listed_by_name_and_digest(root: ObjectStore, tmp_path: Path) -> None:
    uris = []
    for name in ("b", "a", "ab"):
        for content in (b"1", b"2", b"3"):
            model_dir = write_files(tmp_path / f"{name}-{content.decode()}", {"model.safetensors": content})
            uris.append(publish(root, model_dir, name)[0])
    listed = list(list_manifests(root))
    keys = [(manifest.name, manifest.digest) for _, manifest in listed]
    assert keys == sorted(keys)
    assert sorted(uri for uri, _ in listed) == sorted(uris)
    for index, key in enumerate(keys):
        assert list(list_manifests(root, after=key)) == listed[index + 1 :]
    assert [manifest.name for _, manifest in list_manifests(root, "a")] == ["a"] * 3
    assert list(list_manifests(root, "nobody")) == []


def test_a_manifest_that_cannot_be_read_does_not_hide_the_others(
    root: ObjectStore, stores: Stores, published: tuple[ObjectStore, Manifest]
) -> None:
    """Asked for by its own URI it is an error."""
    _, manifest = published
    newer = to_json(manifest).replace(b'"format_version": 1', b'"format_version": 2')
    root.write(f"artifacts/broken/{'0' * 64}/{MANIFEST_NAME}", b"")
    root.write(f"artifacts/newer/{'0' * 64}/{MANIFEST_NAME}", newer)
    assert [found.name for _, found in list_manifests(root)] == ["smollm"]
    with pytest.raises(DataLossError):
        read_manifest(stores.open(f"{root.uri}/artifacts/broken/{'0' * 64}", "uri"))
    with pytest.raises(FailedPreconditionError):
        read_manifest(stores.open(f"{root.uri}/artifacts/newer/{'0' * 64}", "uri"))


def damage(store: ObjectStore) -> None:
    weights = bytearray(FILES["model.safetensors"])
    weights[4_000_000] ^= 1
    store.write("model.safetensors", bytes(weights))
    store.write("config.json", b"{}\n")
    store.delete("empty")
    store.write("extra.bin", b"")


def test_verification_finds_every_kind_of_damage(published: tuple[ObjectStore, Manifest]) -> None:
    store, manifest = published
    damage(store)
    assert verify_files(store, manifest) == [
        FileFault("config.json", FileFaultKind.SIZE_MISMATCH),
        FileFault("empty", FileFaultKind.MISSING),
        FileFault("extra.bin", FileFaultKind.UNEXPECTED),
        FileFault("model.safetensors", FileFaultKind.DIGEST_MISMATCH),
    ]
    with pytest.raises(DataLossError) as raised:
        require_intact(store, manifest)
    assert raised.value.reason == "ARTIFACT_CORRUPT"
    assert raised.value.metadata["uri"] == store.uri
    for path in ("config.json", "empty", "extra.bin", "model.safetensors"):
        assert path in raised.value.message
        assert path in raised.value.metadata["files"]


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("config.json", b"[]", FileFaultKind.DIGEST_MISMATCH),
        ("config.json", b"{} ", FileFaultKind.SIZE_MISMATCH),
        ("model.safetensors", FILES["model.safetensors"][:-1] + b"\0\0", FileFaultKind.SIZE_MISMATCH),
        ("model.safetensors", FILES["model.safetensors"][::-1], FileFaultKind.DIGEST_MISMATCH),
        ("tokenizer/ü.json", None, FileFaultKind.MISSING),
    ],
)
def test_a_damaged_artifact_is_not_fetched(
    published: tuple[ObjectStore, Manifest], tmp_path: Path, path: str, content: bytes | None, kind: FileFaultKind
) -> None:
    """The error names the file, and nothing of the artifact is left on the disk, not even the files that were right."""
    store, manifest = published
    if content is None:
        store.delete(path)
    else:
        store.write(path, content)
    parent = tmp_path / "cache"
    with pytest.raises(DataLossError) as raised:
        download_files(store, manifest, parent / "fetched")
    assert raised.value.reason == "ARTIFACT_CORRUPT"
    assert raised.value.metadata["files"] == f"{path} {kind.value}"
    assert list(parent.iterdir()) == []


def test_a_fetch_given_up_leaves_nothing(published: tuple[ObjectStore, Manifest], tmp_path: Path) -> None:
    store, manifest = published
    parent = tmp_path / "cache"
    counts: list[int] = []

    def on_bytes(count: int) -> None:
        counts.append(count)
        if sum(counts) > 2**20:
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        download_files(store, manifest, parent / "fetched", on_bytes)
    assert list(parent.iterdir()) == []


def test_plain_objects_are_fetched_by_their_listing(published: tuple[ObjectStore, Manifest], tmp_path: Path) -> None:
    """A source has no manifest; its sizes are checked, and a missing one is no loss of ours but not found."""
    store, _ = published
    infos = list(store.list())
    download_files(store, infos, tmp_path / "fetched")
    assert {path: (tmp_path / "fetched" / path).read_bytes() for path in FILES} == FILES
    with pytest.raises(DataLossError):
        download_files(store, [ObjectInfo("config.json", 3)], tmp_path / "other")
    with pytest.raises(NotFoundError):
        download_files(store, [ObjectInfo("missing", 3)], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_fetch_replaces_nothing(published: tuple[ObjectStore, Manifest], tmp_path: Path) -> None:
    store, manifest = published
    target = write_files(tmp_path / "fetched", {"mine": b"x"})
    with pytest.raises(FileExistsError):
        download_files(store, manifest, target)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_an_empty_directory_may_be_filled(published: tuple[ObjectStore, Manifest], tmp_path: Path) -> None:
    store, manifest = published
    (tmp_path / "fetched").mkdir()
    download_files(store, manifest, tmp_path / "fetched")
    assert (tmp_path / "fetched" / "config.json").read_bytes() == b"{}"


def test_publishing_again_gives_the_same_artifact(root: ObjectStore, model_dir: Path) -> None:
    """Equal content has an equal digest, so an equal URI."""
    first, manifest = publish(root, model_dir, "smollm")
    second, _ = publish(root, model_dir, "smollm")
    assert first == second
    assert [found for _, found in list_manifests(root)] == [manifest]


def test_the_description_of_a_directory_is_sorted_and_leaves_the_manifest_out(model_dir: Path) -> None:
    write_files(model_dir, {MANIFEST_NAME: b"{}", f"tokenizer/{MANIFEST_NAME}": b"not at the top"})
    counts: list[int] = []
    files = describe_files(model_dir, counts.append)
    assert [file.path for file in files] == sorted([*FILES, f"tokenizer/{MANIFEST_NAME}"])
    assert sum(counts) == sum(file.size_bytes for file in files)
    assert files[0] == ArtifactFile(
        "config.json", 2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "a\n"])
def test_a_name_that_is_no_directory_has_no_artifact_path(name: str) -> None:
    with pytest.raises(ValueError, match="must"):
        artifact_path(name, "sha256:" + "0" * 64)


def test_a_manifest_of_other_files_cannot_be_published(root: ObjectStore, model_dir: Path) -> None:
    manifest = make_manifest(files=describe_files(model_dir))
    with pytest.raises(ValueError, match="digest"):
        publish_manifest(root, replace(manifest, files=manifest.files[1:]))
    assert list(root.list()) == []
