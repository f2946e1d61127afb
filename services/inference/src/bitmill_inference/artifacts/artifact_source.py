"""Brings an artifact, or a plain checkpoint, to a directory on this host's disk that an engine can load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bitmill_common import artifacts, uris
from bitmill_common.artifact import Manifest
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import DataLossError, NotFoundError
from bitmill_common.object_store import ObjectInfo, ObjectStore, OnBytes
from bitmill_common.stores import Stores
from bitmill_inference.artifacts.artifact_cache import ArtifactCache, CacheEntry
from bitmill_inference.artifacts.stamps import FileState, Stamps, read_state, wait_out_tick

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

    @property
    def size_bytes(self) -> int:
        """Bytes of all files: what `ArtifactSource.fetch` and `verify` each count up to."""
        return self.manifest.size_bytes if self.manifest else sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class LocalModel:
    """A model directory on this host. `store` is rooted at it. `cached`: its entry in the cache, if it lies there.

    `release` gives back what was taken for this load.
    """

    directory: Path
    store: ObjectStore
    cached: CacheEntry | None = None

    def release(self) -> None:
        """Ends the use of the directory, which may then be removed."""
        if self.cached is not None:
            self.cached.release()


class ArtifactSource:
    """Finds, fetches and verifies what models are loaded from. Its calls block; call them from a thread.

    Remote artifacts are kept in `cache` by digest; remote plain checkpoints, which nothing identifies, are fetched anew
    by every load and removed when it is released. Files that were compared with a digest once are not read again
    before they change. `on_bytes` of `fetch` and `verify` is told of `Source.size_bytes` in all, of 0 bytes while they
    wait for somebody else, and may raise to give them up.
    """

    def __init__(self, stores: Stores, cache: ArtifactCache) -> None:
        self._stores = stores
        self._cache = cache
        self._stamps = Stamps(cache.directory / "stamps")

    def sweep(self) -> None:
        """Removes what killed servers left in the cache."""
        self._cache.sweep()
        self._stamps.sweep()

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
            return Source(store, directory_name(store), files=tuple(checkpoint.files))
        return Source(store, manifest.name, manifest)

    def fetch(self, source: Source, on_bytes: OnBytes) -> LocalModel:
        """Returns the model on this host's disk: where it lies, or a copy. Errors as of `ArtifactCache.hold`."""
        directory = source.store.local_path()
        if directory is not None:
            on_bytes(source.size_bytes)
            return LocalModel(directory, source.store)
        if source.manifest is None:
            return self.fetch_files(source.store, source.name, source.files, on_bytes)
        return self._cached_artifact(source.store, source.manifest, on_bytes)

    def fetch_files(self, store: ObjectStore, name: str, files: Sequence[ObjectInfo], on_bytes: OnBytes) -> LocalModel:
        """Returns a copy of files that nobody else uses, and that its release removes."""
        size = sum(file.size_bytes for file in files)
        entry = self._cache.hold_once(name, size, partial(_download, store, files, on_bytes), on_bytes)
        return LocalModel(entry.directory, self._local_store(entry.directory), entry)

    def verify(self, source: Source, local: LocalModel, on_bytes: OnBytes) -> None:
        """Compares every file with the manifest. Raises `DataLossError` naming those that differ."""
        if source.manifest is None:
            return
        before = _state(local)
        if self._stamps.matches(local.directory, source.digest, before):
            on_bytes(source.size_bytes)
            return
        wait_out_tick(before)
        try:
            artifacts.require_intact(local.store, source.manifest, on_bytes)
        except DataLossError:
            if local.cached is not None:
                # The next load then fetches it again instead of failing for ever.
                self._cache.discard(local.cached, on_bytes)
            raise
        if _state(local) == before:
            self._stamps.write(local.directory, source.digest, before)

    def _cached_artifact(self, store: ObjectStore, manifest: Manifest, on_bytes: OnBytes) -> LocalModel:
        download = partial(_download, store, manifest, on_bytes)
        entry = self._cache.hold(manifest.digest, manifest.size_bytes, download, on_bytes)
        try:
            local = LocalModel(entry.directory, self._local_store(entry.directory), entry)
            if entry.fetched:
                # It was hashed as it came.
                self._stamps.write(local.directory, manifest.digest, _state(local))
            else:
                on_bytes(manifest.size_bytes)
        except BaseException:
            entry.release()
            raise
        return local

    def _local_store(self, directory: Path) -> ObjectStore:
        return Stores([self._cache.directory.resolve().as_uri()]).open(directory.resolve().as_uri(), "cache_dir")


def directory_name(store: ObjectStore) -> str:
    """The last part of the URI, made a valid model name as far as lower case and hyphens can."""
    segments = uris.parse(store.uri).segments or ("",)
    return re.sub(r"[^a-z0-9]+", lambda found: found[0] if found[0] in "-_." else "-", segments[-1].lower()).strip(
        "-_."
    )


def _download(store: ObjectStore, files: Manifest | Sequence[ObjectInfo], on_bytes: OnBytes, directory: Path) -> None:
    artifacts.download_files(store, files, directory, on_bytes)


def _state(local: LocalModel) -> FileState:
    """The state of every file, the manifest's left out."""
    paths = [info.path for info in local.store.list() if info.path != artifacts.MANIFEST_NAME]
    return read_state({path: local.store.local_path(path) or local.directory / path for path in paths})
