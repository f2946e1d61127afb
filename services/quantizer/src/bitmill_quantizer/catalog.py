"""What the quantizer tells of the artifacts in its root."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_common import artifacts
from bitmill_common.artifact import Manifest
from bitmill_common.artifacts import FileFault
from bitmill_common.errors import CancelledError, FieldViolation, InvalidArgumentError
from bitmill_common.stores import Stores
from bitmill_quantizer import paging
from bitmill_quantizer.recipes import specs


@dataclass(frozen=True)
class ArtifactPage:
    """One page of artifacts by URI, and the token of the next; an empty token ends the list."""

    artifacts: Sequence[tuple[str, Manifest]]
    next_page_token: str


@dataclass(frozen=True)
class Verification:
    """Every file that is not as the manifest says, and how many bytes were read to tell."""

    faults: Sequence[FileFault]
    verified_bytes: int


class ArtifactCatalog:
    """The artifacts below one root. All methods are coroutines; blocking work runs in threads."""

    def __init__(self, stores: Stores, root: str) -> None:
        self._stores = stores
        self._root = root

    async def get(self, uri: str) -> tuple[str, Manifest]:
        """Returns an artifact's canonical URI and manifest. `NotFoundError` ARTIFACT_NOT_FOUND when there is none."""
        return await asyncio.to_thread(self._get, uri)

    def _get(self, uri: str) -> tuple[str, Manifest]:
        store = self._stores.open(_require_uri(uri), "uri")
        return store.uri, artifacts.read_manifest(store)

    async def list(self, name: str, page_size: int, page_token: str) -> ArtifactPage:
        """Lists the artifacts, or those of one name, ordered by name and digest."""
        return await asyncio.to_thread(self._list, name, paging.page_size(page_size), page_token)

    def _list(self, name: str, size: int, page_token: str) -> ArtifactPage:
        if name and not specs.is_artifact_name(name):
            raise InvalidArgumentError([FieldViolation("name", f"must be {specs.NAME_RULE}", "INVALID_NAME")])
        after = ("", "")
        if page_token:
            last_name, last_digest = paging.read_token(page_token, name, (str, str))
            after = (str(last_name), str(last_digest))
        store = self._stores.open(self._root, "root")
        page = list(itertools.islice(artifacts.list_manifests(store, name, after), size + 1))
        if len(page) <= size:
            return ArtifactPage(page, "")
        last = page[size - 1][1]
        return ArtifactPage(page[:size], paging.make_token(name, [last.name, last.digest]))

    async def verify(self, uri: str) -> Verification:
        """Reads every byte of an artifact again and compares it with the manifest."""
        abandoned = threading.Event()
        try:
            return await asyncio.to_thread(self._verify, uri, abandoned)
        finally:
            # A caller that left must not keep a thread busy with what nobody waits for.
            abandoned.set()

    def _verify(self, uri: str, abandoned: threading.Event) -> Verification:
        verified_bytes = 0

        def on_bytes(count: int) -> None:
            nonlocal verified_bytes
            if abandoned.is_set():
                raise CancelledError("CALL_CANCELLED", "the caller left")
            verified_bytes += count

        store = self._stores.open(_require_uri(uri), "uri")
        faults = artifacts.verify_files(store, artifacts.read_manifest(store), on_bytes)
        return Verification(faults, verified_bytes)


def _require_uri(uri: str) -> str:
    if not uri:
        raise InvalidArgumentError([FieldViolation("uri", "is required", "REQUIRED")])
    return uri
