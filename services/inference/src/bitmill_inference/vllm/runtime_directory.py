"""The directory of this server's short-lived files: the sockets of its engines, and what their starts failed with.

vLLM makes sockets in the directory of temporary files and leaves those of every engine that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Short, as the path of a socket has at most 107 bytes, and vLLM's names have 36.
_PREFIX = ".bitmill-run-"
# As `mkdtemp` makes them, and nobody by hand.
_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")


@contextlib.contextmanager
def runtime_directory(parent: Path) -> Iterator[Path]:
    """Makes a directory in `parent` that is removed with the block, or by the next one if this process is killed."""
    _remove_abandoned(parent)
    directory, descriptor = _locked_directory(parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _locked_directory(parent: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Not by another server that has just taken it for abandoned.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:
                    return directory, descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for name in os.listdir(parent):
        if not _NAME.fullmatch(name):
            continue
        directory = parent / name
        with contextlib.suppress(OSError):  # Gone, locked, another user's, or with something in it that is not ours.
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in directory.iterdir():
                    path.unlink()
                directory.rmdir()
            finally:
                os.close(descriptor)
