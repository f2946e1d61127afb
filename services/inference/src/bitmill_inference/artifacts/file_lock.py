"""Locks among the processes and threads of this host, by a file: `flock`, which dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

# How often a waiter looks whether the lock is free, and whether it should give up. flock itself cannot be interrupted.
POLL_S = 0.05


class FileLock:
    """A lock that is held; make it with `acquire` or `try_acquire`, end it with `release`.

    The file is made when it is missing. Whoever holds the lock alone may `remove` it with the file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, on_wait: Callable[[], None], *, shared: bool = False) -> FileLock:
        """Takes the lock, alone or `shared`. Calls `on_wait` many times a second meanwhile, which may raise."""
        while (lock := cls.try_acquire(path, shared=shared)) is None:
            on_wait()
            time.sleep(POLL_S)
        return lock

    @classmethod
    def try_acquire(cls, path: Path, *, shared: bool = False) -> FileLock | None:
        """Takes the lock, or returns None when somebody else holds it."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    return cls(path, descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno == errno.EWOULDBLOCK:
                    return None
                raise
            os.close(descriptor)  # Removed between opening and locking: others lock a new file.

    def write(self, text: str) -> None:
        """Replaces what is in the file."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def touch(self) -> None:
        """Sets the time of the file to now."""
        os.utime(self._descriptor)

    def release(self) -> None:
        """Ends the lock. Ending it twice is no error."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # A child that was forked meanwhile shares the descriptor, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def remove(self) -> None:
        """Removes the file and ends the lock, which must be held alone."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self.release()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
