"""Stores are opened within the allowed roots, and nowhere else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bitmill_common.artifacts import list_manifests, publish_manifest
from bitmill_common.errors import (
    BitmillError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from bitmill_common.object_store import ObjectInfo
from bitmill_common.stores import StoreOptions, Stores
from support.manifests import make_manifest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_bytes(b"{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"secret")
    return root


def open_root(root: Path, path: str = "model"):  # type: ignore[no-untyped-def]
    return Stores([root.as_uri()]).open(f"{root.as_uri()}/{path}", "uri")


@pytest.mark.parametrize("uri", ["", "models/a", "http://host/a", "file:///a/../b", "s3://bucket/a?x=1"])
def test_a_malformed_uri_names_the_field(root: Path, uri: str) -> None:
    stores = Stores([root.as_uri()])
    for call in (stores.open, stores.open_file):
        with pytest.raises(InvalidArgumentError) as raised:
            call(uri, "spec.source_uri")
        (violation,) = raised.value.violations
        assert violation.field == "spec.source_uri"
        assert violation.reason == "INVALID_URI"


@pytest.mark.parametrize("uri", ["file:///etc", "file:///", "s3://bucket/a", "s3://models-2/a", "s3://models/other"])
def test_a_uri_outside_every_root_is_denied(root: Path, uri: str) -> None:
    """The error names the URI and the roots that would be right."""
    stores = Stores([root.as_uri(), "s3://models/prefix"])
    with pytest.raises(PermissionDeniedError) as raised:
        stores.open(uri, "uri")
    assert raised.value.reason == "URI_OUTSIDE_ROOTS"
    assert raised.value.metadata == {"uri": uri, "roots": f"{root.as_uri()}, s3://models/prefix"}


def test_a_neighbour_that_begins_like_a_root_is_denied(root: Path, tmp_path: Path) -> None:
    (tmp_path / "root-2").mkdir()
    with pytest.raises(PermissionDeniedError):
        Stores([root.as_uri()]).open((tmp_path / "root-2").as_uri(), "uri")


def test_without_roots_nothing_is_allowed(root: Path) -> None:
    with pytest.raises(PermissionDeniedError):
        Stores([]).open(root.as_uri(), "uri")


def test_a_root_itself_and_what_does_not_exist_yet_can_be_opened(root: Path) -> None:
    assert list(open_root(root, "new").list()) == []
    assert [info.path for info in Stores([root.as_uri()]).open(root.as_uri(), "uri").list()] == ["model/config.json"]


def test_a_file_is_opened_through_its_directory(root: Path) -> None:
    """Also when the root is that very file's directory."""
    for allowed in (root, root / "model"):
        store, name = Stores([allowed.as_uri()]).open_file(f"{root.as_uri()}/model/config.json", "uri")
        assert (name, store.read(name)) == ("config.json", b"{}")


@pytest.mark.parametrize("link_in_root", ["away", "model/away", "deep/er/away"])
def test_a_directory_link_out_of_the_roots_is_denied(root: Path, tmp_path: Path, link_in_root: str) -> None:
    (root / link_in_root).parent.mkdir(parents=True, exist_ok=True)
    (root / link_in_root).symlink_to(tmp_path / "secret")
    with pytest.raises(PermissionDeniedError) as raised:
        open_root(root, link_in_root)
    assert raised.value.reason == "URI_OUTSIDE_ROOTS"


def test_a_file_link_out_of_the_roots_is_denied(root: Path, tmp_path: Path) -> None:
    """Read, listed, written below or handed out as a path."""
    (root / "model" / "link").symlink_to(tmp_path / "secret" / "key")
    (root / "model" / "directory").symlink_to(tmp_path / "secret")
    store = open_root(root)
    for call in (
        lambda: store.read("link"),
        lambda: store.head("link"),
        lambda: list(store.read_chunks("link")),
        lambda: list(store.list()),
        lambda: store.local_path("link"),
        lambda: store.read("directory/key"),
        lambda: list(store.list("directory")),
        lambda: store.write("directory/new", b""),
        lambda: store.delete("directory/key"),
    ):
        with pytest.raises(PermissionDeniedError) as raised:
            call()
        assert raised.value.reason == "URI_OUTSIDE_ROOTS"
    assert [path.name for path in (tmp_path / "secret").iterdir()] == ["key"]


def test_the_links_of_a_hub_cache_are_followed(root: Path) -> None:
    """A snapshot there holds links to blobs beside it: outside the checkpoint's directory, inside the root."""
    snapshot = root / "models--org--name" / "snapshots" / "abc"
    blobs = root / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    store = open_root(root, "models--org--name/snapshots/abc")
    assert list(store.list()) == [ObjectInfo("config.json", 2)]
    assert store.read("config.json") == b"{}"


def test_what_is_no_artifact_hides_none(root: Path, tmp_path: Path) -> None:
    """A link out of the roots, a directory that no artifact can be called."""
    store = Stores([root.as_uri()]).open(root.as_uri(), "uri")
    uri = publish_manifest(store, make_manifest(name="m"))
    (root / "artifacts" / "away").symlink_to(tmp_path / "secret")
    (root / "artifacts" / "m" / "away").symlink_to(tmp_path / "secret")
    for name in ("a\\b", "a\nb"):
        (root / "artifacts" / name).mkdir()
        (root / "artifacts" / "m" / name).mkdir()
    assert [found for found, _ in list_manifests(store)] == [uri]


def test_a_manifest_at_anothers_place_is_not_listed(root: Path) -> None:
    """Pages go on from name and digest; one that lies about them would send a caller round in circles."""
    store = Stores([root.as_uri()]).open(root.as_uri(), "uri")
    uri = publish_manifest(store, make_manifest(name="m"))
    (root / "artifacts" / "zz").symlink_to(root / "artifacts" / "m")
    assert [found for found, _ in list_manifests(store)] == [uri]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, ResourceExhaustedError),
        (errno.EDQUOT, ResourceExhaustedError),
        (errno.EROFS, PermissionDeniedError),
    ],
)
def test_a_disk_that_takes_nothing_more_is_told_apart_from_one_that_is_away(
    number: int, error: type[BitmillError], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller tries again what is unavailable; a full or read-only disk stays so."""
    store = open_root(root)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("bitmill_common.staging.os.fsync", refuse)
    with pytest.raises(error):
        store.write("new", b"x")
    assert not (root / "model" / "new").exists()


def test_a_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    stores = Stores([(tmp_path / "alias").as_uri()])
    store = stores.open(f"{(tmp_path / 'alias').as_uri()}/model", "uri")
    assert store.read("config.json") == b"{}"


def test_links_that_lead_nowhere_or_round_in_circles_do_not_break_a_listing(root: Path) -> None:
    (root / "model" / "broken").symlink_to("nothing")
    (root / "model" / "loop").symlink_to(".")
    (root / "model" / "itself").symlink_to("itself")
    (root / "model" / "up").symlink_to("..")
    (root / "other").touch()
    assert [info.path for info in open_root(root).list()] == ["config.json", "up/other"]


@pytest.mark.parametrize("name", [b"new\nline", b"not-utf-8-\xff"])
def test_a_name_that_cannot_be_written_in_a_manifest_is_said_so(root: Path, name: bytes) -> None:
    """Leaving the file out would make an incomplete checkpoint look whole."""
    Path(os.fsdecode(os.fsencode(root / "model") + b"/" + name)).touch()
    with pytest.raises(FailedPreconditionError) as raised:
        list(open_root(root).list())
    assert raised.value.reason == "OBJECT_NAME_UNSUPPORTED"
    raised.value.message.encode()


def test_writing_over_a_link_replaces_the_link(root: Path) -> None:
    (root / "other").write_bytes(b"other")
    (root / "model" / "link").symlink_to("../other")
    store = open_root(root)
    store.write("link", b"new")
    assert (root / "other").read_bytes() == b"other"
    assert store.read("link") == b"new"


def test_a_local_path_is_where_the_object_lies(root: Path) -> None:
    store = open_root(root)
    assert store.local_path() == root / "model"
    assert store.local_path("config.json") == root / "model" / "config.json"


@pytest.mark.parametrize("path", ["model/" + "x" * 300, "/".join(["x" * 200] * 30), "loop/config.json"])
def test_a_path_that_no_file_can_have_is_not_found(root: Path, path: str) -> None:
    """It is no passing trouble of the store, which would be tried again."""
    (root / "loop").symlink_to("loop")
    store = Stores([root.as_uri()]).open(root.as_uri(), "uri")
    with pytest.raises(NotFoundError):
        store.read(path)


@pytest.mark.parametrize("uri", ["models", "file://host/a", "s3://", "file:///a?b"])
def test_a_root_that_is_no_uri_fails_at_once_and_is_named(uri: str) -> None:
    with pytest.raises(ValueError, match="store root") as raised:
        Stores([uri])
    assert repr(uri) in str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (StoreOptions(s3_endpoint="localhost:9000"), "s3_endpoint"),
        (StoreOptions(s3_endpoint="ftp://host"), "s3_endpoint"),
        (StoreOptions(s3_endpoint="http://host:9000"), "s3_allow_http"),
        (StoreOptions(s3_endpoint="https://user:hidden@host"), "s3_endpoint"),
        (StoreOptions(s3_access_key_id="key"), "s3_secret_access_key"),
        (StoreOptions(s3_secret_access_key="hidden"), "s3_access_key_id"),
    ],
)
def test_options_that_cannot_work_fail_at_once_and_are_named(options: StoreOptions, named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        Stores([], options)
    assert "hidden" not in str(raised.value)


def test_options_show_no_secret() -> None:
    options = StoreOptions(s3_access_key_id="key", s3_secret_access_key="hidden", s3_session_token="hidden")
    assert "hidden" not in repr(options)
    stores = Stores(["s3://bucket"], options)
    store = stores.open("s3://bucket/a", "uri")
    assert "hidden" not in repr(stores) + repr(store) + repr(vars(stores)) + repr(vars(store))
