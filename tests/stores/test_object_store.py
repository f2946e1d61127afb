"""What every adapter of the `ObjectStore` port does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitmill_common.errors import NotFoundError
from bitmill_common.object_store import ObjectInfo, ObjectStore, OnBytes
from bitmill_common.stores import Stores

MIB = 2**20
LARGE = 20 * MIB + 7  # more than two parts, and not a whole number of them

ODD_NAMES = [
    "a b.txt",
    "ü/ß.json",
    "x#1",
    "100%.txt",
    "a%20b",
    "q?=&.txt",
    "[1].bin",
    ".hidden",
    "~x",
    "日本/語",
    "a+b",
]


class GivenUpError(Exception):
    """Raised by the tests' `on_bytes`."""


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(LARGE))
    return path


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.path for info in store.list(prefix)]


def test_what_is_written_is_read_back(store: ObjectStore) -> None:
    store.write("config.json", b"{}")
    assert store.read("config.json") == b"{}"
    assert store.head("config.json") == ObjectInfo("config.json", 2)


def test_writing_again_replaces(store: ObjectStore) -> None:
    store.write("config.json", b"a longer first content")
    store.write("config.json", b"second")
    assert store.read("config.json") == b"second"


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_kept(store: ObjectStore, name: str) -> None:
    """Spaces, percent signs, letters of any script and what URLs treat as special are all part of the name."""
    store.write(name, b"content")
    assert store.read(name) == b"content"
    assert paths(store) == [name]


def test_an_empty_object_is_an_object(store: ObjectStore, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    store.write("written", b"")
    store.upload(empty, "uploaded")
    for name in ("written", "uploaded"):
        assert store.head(name).size_bytes == 0
        assert store.read(name) == b""
        assert list(store.read_chunks(name)) == []
        store.download(name, tmp_path / name)
        assert (tmp_path / name).read_bytes() == b""


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, 3, b"012"),
        (4, 3, b"456"),
        (4, None, b"456789"),
        (8, 100, b"89"),
        (10, None, b""),
        (50, 2, b""),
        (3, 0, b""),
    ],
)
def test_a_read_returns_the_range_as_far_as_it_exists(
    store: ObjectStore, offset: int, length: int | None, expected: bytes
) -> None:
    store.write("digits", b"0123456789")
    assert store.read("digits", offset=offset, length=length) == expected


def test_a_large_file_goes_up_and_down_unchanged(store: ObjectStore, large_file: Path, tmp_path: Path) -> None:
    counts: list[int] = []
    store.upload(large_file, "weights/model.safetensors", counts.append)
    assert sum(counts) == LARGE
    assert len(counts) > 1, "progress comes with every part"

    assert b"".join(store.read_chunks("weights/model.safetensors")) == large_file.read_bytes()
    counts.clear()
    target = tmp_path / "not" / "yet" / "there"
    store.download("weights/model.safetensors", target, counts.append)
    assert target.read_bytes() == large_file.read_bytes()
    assert sum(counts) == LARGE
    assert len(counts) > 1


def test_chunks_are_a_few_mebibytes(store: ObjectStore, large_file: Path) -> None:
    store.upload(large_file, "large")
    assert max(len(chunk) for chunk in store.read_chunks("large")) <= 16 * MIB


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_an_upload_given_up_leaves_nothing(store: ObjectStore, large_file: Path, failing_call: int) -> None:
    """At whichever part: no object, not even a name in a listing, and the caller's own exception arrives."""
    with pytest.raises(GivenUpError):
        store.upload(large_file, "large", fail_at(failing_call))
    assert paths(store) == []
    with pytest.raises(NotFoundError):
        store.head("large")


def test_an_upload_given_up_keeps_what_was_there(store: ObjectStore, large_file: Path) -> None:
    store.write("large", b"before")
    with pytest.raises(GivenUpError):
        store.upload(large_file, "large", fail_at(2))
    assert store.read("large") == b"before"


def test_a_small_upload_given_up_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"small")
    with pytest.raises(GivenUpError):
        store.upload(small, "small", fail_at(1))
    assert paths(store) == []


def test_an_unfinished_upload_is_invisible(store: ObjectStore, large_file: Path) -> None:
    """While parts arrive, neither a listing nor a read shows anything of them."""
    seen: list[list[str]] = []

    def look(count: int) -> None:
        seen.append(paths(store))
        with pytest.raises(NotFoundError):
            store.read("large")

    store.upload(large_file, "large", look)
    assert seen
    assert not any(seen)
    assert paths(store) == ["large"]


def test_the_exception_of_on_bytes_is_not_taken_for_one_of_the_store(store: ObjectStore, large_file: Path) -> None:
    """Even when it is of a type that the store itself raises."""

    def fail(count: int) -> None:
        raise FileNotFoundError("of the caller")

    with pytest.raises(FileNotFoundError, match="of the caller"):
        store.upload(large_file, "large", fail)


def test_a_missing_source_file_uploads_nothing(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.upload(tmp_path / "missing", "object")
    assert paths(store) == []


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_download_given_up_leaves_no_target(
    store: ObjectStore, large_file: Path, tmp_path: Path, failing_call: int
) -> None:
    store.upload(large_file, "large")
    target = tmp_path / "downloads" / "large"
    with pytest.raises(GivenUpError):
        store.download("large", target, fail_at(failing_call))
    assert list(target.parent.iterdir()) == []


def test_a_failed_download_keeps_the_target_that_was_there(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"before")
    with pytest.raises(NotFoundError):
        store.download("missing", target)
    assert target.read_bytes() == b"before"


def test_a_missing_object_is_not_found_and_named(store: ObjectStore, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.head("missing/x"),
        lambda: store.read("missing/x"),
        lambda: store.read("missing/x", offset=3, length=1),
        lambda: list(store.read_chunks("missing/x")),
        lambda: store.download("missing/x", tmp_path / "x"),
    ]
    for call in calls:
        with pytest.raises(NotFoundError) as raised:
            call()
        assert raised.value.metadata["uri"] == f"{store.uri}/missing/x"
        assert raised.value.reason == "OBJECT_NOT_FOUND"


def test_a_directory_is_no_object(store: ObjectStore) -> None:
    store.write("directory/file", b"x")
    with pytest.raises(NotFoundError):
        store.head("directory")
    with pytest.raises(NotFoundError):
        store.read("directory")


def test_an_object_has_nothing_below_it(store: ObjectStore) -> None:
    store.write("file", b"x")
    assert paths(store, "file") == []
    with pytest.raises(NotFoundError):
        store.read("file/below")


def test_a_listing_is_in_order_of_whole_paths(store: ObjectStore) -> None:
    """By the path's characters, in which "-" and "." come before the slash of a directory and "0" after it."""
    names = ["a/z", "a-b", "a.json", "a0", "b/c/d", "b/c.x", "Z", "é", "\U0001f600", "\uffee"]
    for name in names:
        store.write(name, b"")
    assert paths(store) == sorted(names)


def test_a_listing_of_a_directory_holds_what_is_below_it_alone(store: ObjectStore) -> None:
    """A name that merely begins like the directory's is another thing."""
    for name in ("a/one", "a/two/three", "ab/four", "a.txt"):
        store.write(name, b"12345")
    assert list(store.list("a")) == [ObjectInfo("a/one", 5), ObjectInfo("a/two/three", 5)]
    assert paths(store, "nothing") == []


def test_directories_are_listed_by_name(store: ObjectStore) -> None:
    for name in ("b/x", "a/deep/er", "ab/x", "file"):
        store.write(name, b"")
    assert list(store.list_directories()) == ["a", "ab", "b"]
    assert list(store.list_directories("a")) == ["deep"]
    assert list(store.list_directories("nothing")) == []


def test_stores_see_no_more_than_their_root(stores: Stores, root: ObjectStore) -> None:
    """A neighbour whose URI only begins like the store's is outside it."""
    root.write("models/one/inside", b"")
    root.write("models/one-more/outside", b"")
    assert paths(stores.open(f"{root.uri}/models/one", "uri")) == ["inside"]


def test_more_objects_than_one_page_are_all_listed(store: ObjectStore) -> None:
    """S3 lists a thousand at a time."""
    names = [f"{index:04}" for index in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, b""), names))
    assert paths(store) == names


def test_deleting_takes_an_object_away(store: ObjectStore) -> None:
    store.write("a", b"x")
    store.delete("a")
    store.delete("a")
    store.delete("never/was")
    assert paths(store) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "", "a\nb", "a\0b"])
def test_a_path_that_could_leave_the_root_is_refused(store: ObjectStore, tmp_path: Path, path: str) -> None:
    """Before anything is read or written."""
    source = tmp_path / "source"
    source.touch()
    for call in (
        lambda: store.read(path),
        lambda: store.write(path, b""),
        lambda: store.upload(source, path),
        lambda: store.delete(path),
    ):
        with pytest.raises(ValueError, match="must"):
            call()


def test_threads_may_use_one_store_at_once(store: ObjectStore, tmp_path: Path) -> None:
    contents = {f"file-{index}": os.urandom(9 * MIB if index % 2 else 1000) for index in range(6)}
    start = threading.Barrier(len(contents))

    def roundtrip(name: str) -> bytes:
        source, target = tmp_path / name, tmp_path / f"{name}.back"
        source.write_bytes(contents[name])
        start.wait(timeout=60)
        store.upload(source, name)
        store.download(name, target)
        return target.read_bytes()

    with ThreadPoolExecutor(len(contents)) as pool:
        results = dict(zip(contents, pool.map(roundtrip, contents), strict=True))
    assert results == contents


def test_writers_of_one_name_leave_one_whole_content(store: ObjectStore, tmp_path: Path) -> None:
    """Whichever of several writers wins, no mixture of them is ever there."""
    contents = [bytes([index]) * (9 * MIB) for index in range(4)]

    def upload(content: bytes) -> None:
        source = tmp_path / str(content[0])
        source.write_bytes(content)
        store.upload(source, "contested")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upload, contents))
    assert store.read("contested") in contents
    assert paths(store) == ["contested"]


def fail_at(call: int) -> OnBytes:
    """Returns an `on_bytes` that raises at its `call`-th call."""
    calls = 0

    def on_bytes(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise GivenUpError

    return on_bytes
