"""Brings an artifact, or a plain checkpoint, to a directory on this host's disk that an engine can load."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitmill_common import artifacts, uris
from bitmill_common.artifact import Manifest
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import DataLossError, NotFoundError
from bitmill_common.object_store import ObjectInfo, ObjectStore, OnBytes
from bitmill_common.stores import Stores

# Where artifacts lie in a store. Such a directory without a manifest is half-written, not a plain checkpoint.
_ARTIFACT_DIRECTORY = re.compile(r"/artifacts/[^/]+/[0-9a-f]{64}$")


@dataclass(frozen=True)
class Source:
    """What a URI turned out to be. `manifest` is None for a plain checkpoint, whose files are `files`."""

    store: ObjectStore
    name: str
    manifest: Manifest | None = None
    files: tuple[ObjectInfo, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the artifact; empty for a plain checkpoint."""
        return self.manifest.digest if self.manifest else ""


@dataclass(frozen=True)
class LocalModel:
    """A model directory on this host. `store` is rooted at it; `release` gives back what was made for this load."""

    directory: Path
    store: ObjectStore
    cached: bool = False
    release: Callable[[], None] = lambda: None


class ArtifactSource:
    """Finds, fetches and verifies what models are loaded from. Its calls block; call them from a thread.

    Remote artifacts are kept in `cache_dir` by digest; remote plain checkpoints, which nothing identifies, are fetched
    anew by every load and removed when it is released.
    """

    def __init__(self, stores: Stores, cache_dir: Path) -> None:
        self._stores = stores
        self._cache_dir = cache_dir
        self._fetching = threading.Lock()

    def open(self, uri: str, field: str) -> ObjectStore:
        """Returns the store at `uri`. Errors as of `Stores.open`."""
        return self._stores.open(uri, field)

    def resolve(self, store: ObjectStore) -> Source:
        """Reads the manifest, or else the checkpoint's configuration and headers.

        Raises `NotFoundError` for an artifact without a manifest, which is still being written or was given up, and
        the errors of `inspect_checkpoint` for a directory that is no usable checkpoint either.
        """
        try:
            manifest = artifacts.read_manifest(store)
        except NotFoundError:
            if _ARTIFACT_DIRECTORY.search(store.uri):
                raise
            checkpoint = inspect_checkpoint(store)
            return Source(store, _directory_name(store), files=tuple(checkpoint.files))
        return Source(store, manifest.name, manifest)

    def fetch(self, source: Source, on_bytes: OnBytes) -> LocalModel:
        """Returns the model on this host's disk: where it lies, or a copy. `on_bytes` may raise to give it up."""
        directory = source.store.local_path()
        if directory is not None:
            return LocalModel(directory, source.store)
        if source.manifest is None:
            return self._download_checkpoint(source, on_bytes)
        return self._cached_artifact(source.store, source.manifest, on_bytes)

    def verify(self, source: Source, local: LocalModel, on_bytes: OnBytes) -> None:
        """Compares every file with the manifest. Raises `DataLossError` naming those that differ."""
        if source.manifest is None:
            return
        try:
            artifacts.require_intact(local.store, source.manifest, on_bytes)
        except DataLossError:
            if local.cached:
                # The next load then fetches it again instead of failing for ever.
                shutil.rmtree(local.directory)
            raise

    def _cached_artifact(self, store: ObjectStore, manifest: Manifest, on_bytes: OnBytes) -> LocalModel:
        directory = self._cache_dir / "artifacts" / manifest.digest.removeprefix("sha256:")
        # Another process may share the cache and be the faster one.
        with self._fetching, contextlib.suppress(FileExistsError):
            if not directory.is_dir():
                artifacts.download_files(store, manifest, directory, on_bytes)
        return LocalModel(directory, self._local_store(directory), cached=True)

    def _download_checkpoint(self, source: Source, on_bytes: OnBytes) -> LocalModel:
        directory = self._cache_dir / "checkpoints" / f"{source.name}-{uuid.uuid4().hex}"
        artifacts.download_files(source.store, source.files, directory, on_bytes)
        return LocalModel(
            directory, self._local_store(directory), release=lambda: shutil.rmtree(directory, ignore_errors=True)
        )

    def _local_store(self, directory: Path) -> ObjectStore:
        return Stores([self._cache_dir.resolve().as_uri()]).open(directory.resolve().as_uri(), "cache_dir")


def _directory_name(store: ObjectStore) -> str:
    """The last part of the URI, made a valid model name as far as lower case and hyphens can."""
    segments = uris.parse(store.uri).segments or ("",)
    return re.sub(r"[^a-z0-9]+", lambda found: found[0] if found[0] in "-_." else "-", segments[-1].lower()).strip(
        "-_."
    )
