"""The adapter for `file://`: a directory on this host's disk or on a mounted file system.

It is not obstore's LocalStore, because that one renames without flushing to the disk (a power cut can publish an empty
manifest), follows links out of the root, gives a whole listing up for one looping link or odd name, and cannot hold
a file named like `x#1`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from bitmill_common import uris
from bitmill_common.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from bitmill_common.object_store import ObjectInfo, OnBytes
from bitmill_common.staging import is_staging, staged_file

CHUNK_BYTES = 8 * 2**20


def real_path(path: Path) -> Path:
    """Follows all links, also of a path that does not exist. Unlike `Path.resolve`, a link to itself is no error."""
    return Path(os.path.realpath(path))


class LocalStore:
    """An `ObjectStore` at a `file://` URI.

    Symbolic links are followed as long as they end within `roots` (absolute, resolved); one that leaves them is
    `PermissionDeniedError`. Links that end nowhere and unfinished writes are not there at all.
    """

    def __init__(self, uri: uris.StoreUri, roots: Sequence[Path]) -> None:
        self.uri = str(uri)
        self._directory = uri.file_path
        self._roots = tuple(roots)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self._translated(prefix):
            yield from self._walk(self._resolve(prefix), prefix, ())

    def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See `ObjectStore.list_directories`."""
        with self._translated(prefix):
            directory = self._resolve(prefix)
            return sorted(name for name, is_directory in self._entries(directory) if is_directory)

    def head(self, path: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self._translated(path):
            source = self._resolve_file(path)
            return ObjectInfo(path, source.stat().st_size)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.read`."""
        with self._translated(path), self._resolve_file(path).open("rb") as reader:
            reader.seek(offset)
            return reader.read() if length is None else reader.read(length)

    def read_chunks(self, path: str) -> Generator[bytes, None, None]:
        """See `ObjectStore.read_chunks`."""
        with self._translated(path):
            reader = self._resolve_file(path).open("rb", buffering=0)
        with reader:
            while True:
                with self._translated(path):
                    chunk = reader.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        """See `ObjectStore.write`."""
        with self._translated(path), staged_file(self._resolve_parent(path)) as writer:
            writer.write(data)

    def upload(self, source: Path, path: str, on_bytes: OnBytes = lambda count: None) -> None:
        """See `ObjectStore.upload`. It copies, so the source may be changed afterwards."""
        with source.open("rb", buffering=0) as reader, contextlib.ExitStack() as staging:
            # Translates what the store's disk raises, and neither the source's errors nor those of `on_bytes`.
            with self._translated(path):
                writer = staging.enter_context(staged_file(self._resolve_parent(path)))
            while chunk := reader.read(CHUNK_BYTES):
                with self._translated(path):
                    writer.write(chunk)
                on_bytes(len(chunk))
            with self._translated(path):
                staging.close()

    def download(self, path: str, target: Path, on_bytes: OnBytes = lambda count: None) -> None:
        """See `ObjectStore.download`."""
        chunks = self.read_chunks(path)
        with contextlib.closing(chunks), staged_file(target) as writer:
            for chunk in chunks:
                writer.write(chunk)
                on_bytes(len(chunk))

    def delete(self, path: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(path):
            self._resolve_parent(path).unlink(missing_ok=True)

    def local_path(self, path: str = "") -> Path | None:
        """See `ObjectStore.local_path`."""
        return self._resolve(path)

    def _walk(self, directory: Path, path: str, above: tuple[Path, ...]) -> Iterator[ObjectInfo]:
        """Yields the files below `directory`, which is `path` in this store; `above` are the directories over it."""
        # A directory sorts by the slash after its name, as it does in the order of whole paths.
        entries = [f"{name}/" if is_directory else name for name, is_directory in self._entries(directory)]
        for name in sorted(entries):
            entry = f"{path}/{name}" if path else name
            self._check_listed(entry.removesuffix("/"))
            resolved = self._resolve(entry.removesuffix("/"))
            if not name.endswith("/"):
                yield ObjectInfo(entry, resolved.stat().st_size)
            elif resolved not in (*above, directory):  # a link to a directory above it would never end
                yield from self._walk(resolved, entry.removesuffix("/"), (*above, directory))

    def _check_listed(self, path: str) -> None:
        try:
            uris.check_path(path)
        except ValueError as error:
            message = f"{self.uri} holds a file {path!r} whose name this server cannot use: it {error}"
            raise FailedPreconditionError("OBJECT_NAME_UNSUPPORTED", message, {"uri": self.uri}) from error

    def _entries(self, directory: Path) -> Iterator[tuple[str, bool]]:
        """Yields name and whether it is a directory, for every file and directory directly in `directory`."""
        if not directory.is_dir():
            return
        with os.scandir(directory) as entries:
            for entry in entries:
                path = Path(entry)  # whose tests, unlike the entry's, answer False for a link that leads to itself
                if not is_staging(entry.name) and (path.is_dir() or path.is_file()):
                    yield entry.name, path.is_dir()

    def _resolve(self, path: str) -> Path:
        """Returns the real path of a file or directory, which need not exist, and checks that it is in the roots."""
        whole = self._directory / uris.check_path(path) if path else self._directory
        resolved = real_path(whole)
        if not any(resolved.is_relative_to(root) for root in self._roots):
            uri = self._uri_of(path)
            raise PermissionDeniedError(
                "URI_OUTSIDE_ROOTS",
                f"{uri} leads through a symbolic link out of the roots that this server allows",
                {"uri": uri},
            )
        return resolved

    def _resolve_file(self, path: str) -> Path:
        resolved = self._resolve(uris.check_path(path))
        if not resolved.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(resolved))
        return resolved

    def _resolve_parent(self, path: str) -> Path:
        """Returns where to write or delete: the directory is resolved, but a link in the last place is the target."""
        directory, _, name = uris.check_path(path).rpartition("/")
        return self._resolve(directory) / name

    def _uri_of(self, path: str) -> str:
        return uris.join(self.uri, path)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._raise_translated(error, self._uri_of(path))

    def _raise_translated(self, error: OSError, uri: str) -> NoReturn:
        metadata = {"uri": uri}
        cause = error.strerror or type(error).__name__
        match error:
            case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
                raise NotFoundError("OBJECT_NOT_FOUND", f"there is no object {uri}", metadata) from error
            case OSError(errno=errno.ENAMETOOLONG | errno.ELOOP):
                raise NotFoundError("OBJECT_NOT_FOUND", f"there can be no object {uri}: {cause}", metadata) from error
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                raise ResourceExhaustedError("DISK_FULL", f"{uri}: {cause}", metadata) from error
            case PermissionError() | OSError(errno=errno.EROFS):
                raise PermissionDeniedError("STORE_ACCESS_DENIED", f"{uri}: {cause}", metadata) from error
        raise UnavailableError("STORE_UNAVAILABLE", f"{uri}: {cause}", metadata) from error
