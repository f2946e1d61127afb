"""Files and directories appear whole or not at all, and killed writers leave nothing for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitmill_common.errors import ResourceExhaustedError
from bitmill_common.staging import is_staging, remove_abandoned, remove_directory, staged_directory, staged_file
from bitmill_common.stores import Stores

WRITE_AND_DIE = """
import os, sys
from pathlib import Path
from bitmill_common.staging import staged_directory, staged_file
target = Path(sys.argv[1])
with staged_file(target / "file") as writer, staged_directory(target / "directory") as staging:
    writer.write(b"half")
    writer.flush()
    (staging / "half").write_bytes(b"half")
    os._exit(9)
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "file"
    with staged_file(target) as writer:
        writer.write(b"content")
        assert not target.exists()
    assert target.read_bytes() == b"content"
    assert names(target.parent) == ["file"]


def test_a_file_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    with contextlib.suppress(KeyboardInterrupt), staged_file(target) as writer:
        writer.write(b"half")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "directory"
    with staged_directory(target) as staging:
        (staging / "a").write_bytes(b"a")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(target.parent) == ["directory"]


def test_a_directory_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), staged_directory(tmp_path / "directory") as staging:
        (staging / "a").write_bytes(b"a")
        raise RuntimeError
    assert names(tmp_path) == []


def test_a_directory_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    """Neither when it was there before nor when somebody else was faster; the loser leaves nothing."""
    target = tmp_path / "directory"
    slow = staged_directory(target)
    (slow.__enter__() / "mine").touch()
    with staged_directory(target) as fast:
        (fast / "theirs").touch()
    with pytest.raises(FileExistsError):
        slow.__exit__(None, None, None)
    with pytest.raises(FileExistsError), staged_directory(target):
        pytest.fail("it is entered")
    assert names(target) == ["theirs"]
    assert names(tmp_path) == ["directory"]


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with staged_file(tmp_path / "file"), staged_directory(tmp_path / "directory"):
            pass
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o750


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    with staged_file(tmp_path / ("x" * 255)) as writer:
        writer.write(b"content")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"content"


def test_what_a_killed_writer_left_is_invisible_and_then_removed(tmp_path: Path) -> None:
    """By the next writer of the same target; those of other targets, and those still at work, stay."""
    done = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 9
    assert [is_staging(name) for name in names(tmp_path)] == [True, True]
    store = Stores([tmp_path.as_uri()]).open(tmp_path.as_uri(), "uri")
    assert list(store.list()) == []
    assert list(store.list_directories()) == []

    with staged_file(tmp_path / "file") as first, staged_directory(tmp_path / "directory"):
        first.write(b"first")
        with staged_file(tmp_path / "file") as second:
            second.write(b"second")
    assert names(tmp_path) == ["directory", "file"]
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_full_disk_is_said_to_be_full(tmp_path: Path) -> None:
    """/dev/full stands for it: it takes no byte."""
    with (
        pytest.raises(ResourceExhaustedError) as raised,
        staged_file(tmp_path / "file"),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert raised.value.reason == "DISK_FULL"
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_what_killed_writers_left_is_removed_for_any_target(tmp_path: Path) -> None:
    """Unfinished work that somebody is at, and what is finished, stay; a directory that is not there has none."""
    abandoned = tmp_path / ".x.bitmill-partial-1"
    abandoned.mkdir()
    (abandoned / "file").write_text("half")
    (tmp_path / ".y.bitmill-partial-2").write_text("half")
    (tmp_path / "whole").write_text("whole")
    with staged_directory(tmp_path / "other") as staging:
        remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"whole", staging.name}
    remove_abandoned(tmp_path / "missing")


def test_a_directory_is_removed_whole(tmp_path: Path) -> None:
    """With everything in it; what is left of it in between has a staging name."""
    (tmp_path / "directory" / "below").mkdir(parents=True)
    (tmp_path / "directory" / "below" / "file").write_text("x")
    remove_directory(tmp_path / "directory")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        remove_directory(tmp_path / "directory")
