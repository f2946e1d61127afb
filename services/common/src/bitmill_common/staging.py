"""Files and directories on this host's disk that appear whole or not at all.

The content is written beside the target under a staging name, flushed to the disk and then renamed. A staging name is
locked while it is written, so what a killed process left behind is told apart and removed by the next writer of the
same target.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bitmill_common.errors import ResourceExhaustedError

_MARK = ".bitmill-partial-"


def is_staging(name: str) -> bool:
    """Whether a file or directory of this name is somebody's unfinished work."""
    return _MARK in name


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `target` when the block ends; after an exception nothing is left.

    Directories that are missing above it are created and stay. What is written survives a power cut once this returns.
    `ResourceExhaustedError` DISK_FULL when the disk or a quota is full.
    """
    _make_directory(target.parent)
    remove_abandoned(target.parent, _staging_prefix(target))
    with _locked_file(target) as (staging, writer):
        try:
            yield writer
            writer.flush()
            os.fsync(writer.fileno())
            os.replace(staging, target)
        except BaseException as error:
            staging.unlink(missing_ok=True)
            _raise_if_full(error, target)
            raise
    _sync_directory(target.parent)


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Makes a directory that becomes `target` when the block ends; after an exception nothing is left.

    `FileExistsError` when there is something in `target`, before the block or when it ends. `ResourceExhaustedError`
    DISK_FULL as of `staged_file`.
    """
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    _make_directory(target.parent)
    remove_abandoned(target.parent, _staging_prefix(target))
    with _locked_directory(target) as staging:
        try:
            yield staging
            _sync_directory(staging)
            _rename_directory(staging, target)
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            _raise_if_full(error, target)
            raise
    _sync_directory(target.parent)


@contextlib.contextmanager
def _locked_file(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    while True:
        staging = _staging_path(target)
        with staging.open("xb") as writer:
            if not _lock(writer.fileno()):
                continue
            yield staging, writer
            return


@contextlib.contextmanager
def _locked_directory(target: Path) -> Iterator[Path]:
    while True:
        staging = _staging_path(target)
        staging.mkdir()
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not _lock(descriptor):
                continue
            yield staging
            return
        finally:
            os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _raise_if_full(error: BaseException, target: Path) -> None:
    if is_full(error):
        metadata = {"path": str(target)}
        raise ResourceExhaustedError("DISK_FULL", f"no space left on the disk for {target}", metadata) from error


def _rename_directory(staging: Path, target: Path) -> None:
    try:
        os.replace(staging, target)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(f"{target} was filled by somebody else meanwhile") from error
        raise


def _staging_path(target: Path) -> Path:
    return target.parent / f"{_staging_prefix(target)}{secrets.token_hex(8)}"


def _staging_prefix(target: Path) -> str:
    """The same for every writer of `target`, and short: a name may be as long as the file system allows."""
    return f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}{_MARK}"


def _lock(descriptor: int) -> bool:
    """Takes the lock of a staging name just made; False when a remover was faster."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # A file system without locks: nobody can take it for abandoned either.
    return os.fstat(descriptor).st_nlink > 0


def remove_abandoned(directory: Path, prefix: str = "") -> None:
    """Removes what killed writers left directly in `directory`: staging names that nobody holds the lock of.

    `prefix`: only those that begin with it. A directory that is not there has none.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        if not (is_staging(name) and name.startswith(prefix)):
            continue
        path = directory / name
        with contextlib.suppress(OSError):  # Gone, locked, or on a file system without locks: not ours to remove.
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def remove_directory(path: Path) -> None:
    """Removes a directory: it is gone at once, and whole, also when this process is killed meanwhile.

    What is left of it then has a staging name, which `remove_abandoned` knows.
    """
    staging = _staging_path(path)
    os.replace(path, staging)
    shutil.rmtree(staging, ignore_errors=True)


def _make_directory(path: Path) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
