"""The object store port: immutable files by path under one root URI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

OnBytes = Callable[[int], None]
"""Called with the number of bytes just transferred; may raise to give the transfer up."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its path under the store's root, with forward slashes, and its size."""

    path: str
    size_bytes: int


class ObjectStore(Protocol):
    """A directory in an object store. Paths are relative to `uri`, never absolute, never with "..".

    Calls block; they may be made from any thread. What is written becomes visible whole or not at all. Errors:
    `NotFoundError` for a missing object, `PermissionDeniedError` when the store refuses the credentials,
    `UnavailableError` when it cannot be reached; all name the URI.
    """

    uri: str
    """The root, without a trailing slash: `file:///models` or `s3://bucket/prefix`."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields every object below the directory `prefix`, in order of path; nothing when there is none."""

    def list_directories(self, prefix: str = "") -> Sequence[str]:
        """Returns the names of the directories directly below `prefix`, sorted."""

    def head(self, path: str) -> ObjectInfo:
        """Returns one object's size."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes from `offset`; without `length` the rest. For small pieces: it is held in memory."""

    def read_chunks(self, path: str) -> Iterator[bytes]:
        """Yields the content in order, in pieces of a few MiB."""

    def write(self, path: str, data: bytes) -> None:
        """Writes one small object, replacing what is there."""

    def upload(self, source: Path, path: str, on_bytes: OnBytes = lambda count: None) -> None:
        """Uploads a local file of any size in parallel parts, in bounded memory; a failed one leaves nothing."""

    def download(self, path: str, target: Path, on_bytes: OnBytes = lambda count: None) -> None:
        """Downloads an object of any size in bounded memory; `target` appears whole or not at all."""

    def delete(self, path: str) -> None:
        """Deletes an object; one that is not there is no error."""

    def local_path(self, path: str = "") -> Path | None:
        """Returns where the object or directory lies on this host's disk; None when the store is remote."""
