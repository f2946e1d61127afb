"""The local cache of what comes from remote stores: bounded in size, shared by the server processes of one host.

    <directory>/artifacts/<hex digest>/    artifacts, kept until their room is needed: least recently used first
    <directory>/downloads/<name>-<id>/     everything without a digest of its own, for as long as its model is loaded
    <directory>/locks/<name>.lock          held shared by every user of an entry, alone by who removes it
    <directory>/locks/<name>.fetch         held by the one process that downloads the entry; has its size
    <directory>/locks/room.lock            held while room is made

All locks end with their process, so a killed server leaves at worst partial directories, which nobody holds; the next
start or download removes them. Locks are taken in the order of this list, and those of other entries never waited for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from bitmill_common.errors import FailedPreconditionError, ResourceExhaustedError
from bitmill_common.object_store import OnBytes
from bitmill_common.staging import is_full, is_staging, remove_abandoned, remove_directory
from bitmill_inference.artifacts.cache_room import CacheRoom
from bitmill_inference.artifacts.file_lock import FileLock

log = structlog.get_logger("bitmill.models")

# Of a directory's name, which a file system bounds.
_MAX_NAME = 64
_ARTIFACTS = "artifacts"
_DOWNLOADS = "downloads"

Download = Callable[[Path], None]
"""Fills a directory that is not there yet, whole or not at all, through `bitmill_common.staging`."""


@dataclass(frozen=True)
class CacheEntry:
    """A directory of the cache that is in use until `release`. `fetched`: it was downloaded just now.

    `identity` tells it from one that is downloaded in its place.
    """

    directory: Path
    fetched: bool
    identity: tuple[int, int]
    release: Callable[[], None]


class ArtifactCache:
    """Directories by digest, and directories for one use. Its calls block; they may be made from any thread.

    `max_bytes` bounds all files of the cache together; None: 90 % of what it holds and what its disk has free.
    """

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._locks = directory / "locks"

    def hold(self, digest: str, size_bytes: int, download: Download, on_bytes: OnBytes) -> CacheEntry:
        """Returns the entry of a digest, downloaded when it is missing: once, whoever else wants it at the same time.

        `on_bytes` is called with 0 while another process downloads it, and may raise. `ResourceExhaustedError` before
        anything is downloaded when there is no room: CACHE_TOO_SMALL, CACHE_FULL or DISK_FULL.
        `FailedPreconditionError` CACHE_UNUSABLE when the directory cannot be written or has no locks.
        """
        with self._usable():
            return self._hold(_ARTIFACTS, digest.removeprefix("sha256:"), size_bytes, download, on_bytes)

    def hold_once(self, name: str, size_bytes: int, download: Download, on_bytes: OnBytes) -> CacheEntry:
        """Returns a directory of its own, which its release removes. Errors as of `hold`."""
        with self._usable():
            entry = self._hold(_DOWNLOADS, f"{name[:_MAX_NAME]}-{uuid.uuid4().hex}", size_bytes, download, on_bytes)

        def release() -> None:
            entry.release()
            try:
                self._remove_unused(entry.directory)
            except OSError as error:
                # The next sweep tries again.
                log.warning("download_not_removed", directory=str(entry.directory), error=str(error))

        return replace(entry, release=release)

    def discard(self, entry: CacheEntry, on_bytes: OnBytes) -> None:
        """Removes an entry whose files are damaged. Others who hold it keep what they have opened."""
        lock = self._alone(f"{entry.directory.name}.fetch", on_bytes)
        with self._usable(), lock, contextlib.suppress(FileNotFoundError):
            # Somebody else may have found the damage too, and have downloaded it again.
            if _identity(entry.directory) == entry.identity:
                remove_directory(entry.directory)

    def sweep(self) -> None:
        """Removes what killed processes left. Where the cache cannot be used, that is logged and no error."""
        try:
            self._sweep()
        except OSError as error:
            log.warning("cache_unusable", directory=str(self.directory), error=str(error))

    def _hold(self, kind: str, name: str, size_bytes: int, download: Download, on_bytes: OnBytes) -> CacheEntry:
        directory = self.directory / kind / name
        (self.directory / kind).mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(exist_ok=True)
        use = FileLock.acquire(self._locks / f"{name}.lock", lambda: on_bytes(0), shared=True)
        try:
            fetched = not directory.is_dir() and self._fetch(directory, size_bytes, download, on_bytes)
            identity = _identity(directory)
            use.touch()
        except BaseException:
            use.release()
            self._remove_lock(directory)
            raise

        def release() -> None:
            with contextlib.suppress(OSError):
                use.touch()
            use.release()

        return CacheEntry(directory, fetched, identity, release)

    def _fetch(self, directory: Path, size_bytes: int, download: Download, on_bytes: OnBytes) -> bool:
        """Downloads an entry unless another process did while this one waited; returns whether it was downloaded."""
        with self._alone(f"{directory.name}.fetch", on_bytes) as fetch:
            if directory.is_dir():
                return False
            with self._alone("room.lock", on_bytes):
                self._sweep()
                self._make_room(size_bytes)
                fetch.write(str(size_bytes))
            download(directory)
            return True

    def _make_room(self, size_bytes: int) -> None:
        """Removes entries that nobody uses, or none when that is not enough."""
        room = CacheRoom(
            size_bytes,
            self._max_bytes,
            held=sum(_size(path) for path in self._entries(_ARTIFACTS, _DOWNLOADS)),
            pending=sum(self._pending_sizes()),
            staged=sum(_size(path) for path in self._staging()),
            free=shutil.disk_usage(self.directory).free,
        )
        room.check_possible()
        excess = room.excess
        if excess <= 0:
            return
        with contextlib.ExitStack() as locks:
            victims: dict[Path, tuple[FileLock, int]] = {}
            for path in sorted(self._entries(_ARTIFACTS), key=self._last_use):
                if sum(size for _, size in victims.values()) >= excess:
                    break
                if (lock := FileLock.try_acquire(self._locks / f"{path.name}.lock")) is not None:
                    locks.callback(lock.release)
                    victims[path] = lock, _size(path)
            room.check_enough(sum(size for _, size in victims.values()))
            for path, (lock, size) in victims.items():
                remove_directory(path)
                lock.remove()
                log.info("artifact_evicted", digest=f"sha256:{path.name}", size_bytes=size)

    def _sweep(self) -> None:
        for kind in (_ARTIFACTS, _DOWNLOADS):
            remove_abandoned(self.directory / kind)
        for path in self._entries(_DOWNLOADS):
            self._remove_unused(path)
        for path in self._locks.glob("*.fetch"):
            if (lock := FileLock.try_acquire(path)) is not None:
                lock.remove()
        for path in self._locks.glob("*.lock"):
            # Of entries that were discarded, or removed by hand.
            if not any((self.directory / kind / path.stem).is_dir() for kind in (_ARTIFACTS, _DOWNLOADS)):
                self._remove_lock(self.directory / _ARTIFACTS / path.stem)

    def _remove_unused(self, path: Path) -> None:
        lock = FileLock.try_acquire(self._locks / f"{path.name}.lock")
        if lock is not None:
            with contextlib.suppress(FileNotFoundError):
                remove_directory(path)
            lock.remove()

    def _remove_lock(self, path: Path) -> None:
        """Removes the lock's file of an entry that could not be made."""
        if (lock := FileLock.try_acquire(self._locks / f"{path.name}.lock")) is None:
            return
        if path.is_dir():
            lock.release()
        else:
            lock.remove()

    def _entries(self, *kinds: str) -> Iterator[Path]:
        for kind in kinds:
            yield from (path for path in _directories(self.directory / kind) if not is_staging(path.name))

    def _staging(self) -> Iterator[Path]:
        for kind in (_ARTIFACTS, _DOWNLOADS):
            yield from (path for path in _directories(self.directory / kind) if is_staging(path.name))

    def _pending_sizes(self) -> Iterator[int]:
        """Yields the whole sizes of what is being downloaded; a download that has made no room yet has none."""
        for path in self._locks.glob("*.fetch"):
            with contextlib.suppress(FileNotFoundError):
                yield int(path.read_text() or 0)

    def _last_use(self, path: Path) -> int:
        for used in (self._locks / f"{path.name}.lock", path):
            with contextlib.suppress(FileNotFoundError):
                return used.stat().st_mtime_ns
        return 0

    @contextlib.contextmanager
    def _alone(self, name: str, on_bytes: OnBytes) -> Iterator[FileLock]:
        lock = FileLock.acquire(self._locks / name, lambda: on_bytes(0))
        try:
            lock.write("")  # of a killed process
            yield lock
        finally:
            lock.remove()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                message = f"no space is left on the disk of the cache directory {self.directory}"
                raise ResourceExhaustedError("DISK_FULL", message, {"path": str(self.directory)}) from error
            raise FailedPreconditionError(
                "CACHE_UNUSABLE",
                f"the cache directory {self.directory} of this server cannot be used: {error.strerror or error}",
                {"path": str(self.directory)},
            ) from error


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_ino, status.st_mtime_ns


def _directories(parent: Path) -> list[Path]:
    try:
        return [Path(entry) for entry in os.scandir(parent) if entry.is_dir()]
    except FileNotFoundError:
        return []


def _size(directory: Path) -> int:
    """Returns the bytes of all files below a directory; those that vanish meanwhile do not count."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size
