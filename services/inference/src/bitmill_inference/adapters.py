"""The adapters (LoRA) of one model: loaded, named by calls, unloaded. One event loop calls everything here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog

from bitmill_common import artifacts
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import (
    AlreadyExistsError,
    BitmillError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from bitmill_common.manifest import content_digest
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_inference.adapter_checks import CONFIG, PICKLES, WEIGHTS, check_adapter
from bitmill_inference.artifact_source import ArtifactSource, LocalModel, directory_name
from bitmill_inference.model import MODEL_NAME, MODEL_NAME_RULE, Adapter
from bitmill_inference.ports import Engine, LocalAdapter
from bitmill_inference.threads import in_thread
from bitmill_inference.violations import Violations

log = structlog.get_logger("bitmill.models")

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class AdapterRequest:
    """What LoadAdapter asks for. `digest`: what the files must have; empty for whatever they are."""

    name: str
    store: ObjectStore
    digest: str = ""


def adapter_request(source: ArtifactSource, model: str, name: str, uri: str, digest: str) -> AdapterRequest:
    """Returns a checked request; an empty `name` becomes that of the directory.

    Raises `InvalidArgumentError` naming every wrong field, and the errors of `Stores.open`.
    """
    store = source.open(uri, "uri")
    given, name = name, name or directory_name(store)
    violations = Violations()
    if not MODEL_NAME.fullmatch(name):
        taken = "" if given else f"is needed: {name!r}, taken from the URI, "
        violations.add("name", f"{taken}must be {MODEL_NAME_RULE}", "INVALID_NAME")
    elif name == model:
        violations.add("name", f"{name!r} is the name of the model itself", "NAME_OF_MODEL")
    if digest and not _DIGEST.fullmatch(digest):
        violations.add("digest", 'must be "sha256:" and 64 lower-case hexadecimal digits', "INVALID_DIGEST")
    violations.raise_if_any()
    return AdapterRequest(name, store, digest)


class Adapters:
    """The adapters of one model by name.

    `hold` keeps the model's engine as it is, or raises `UnavailableError` while it does not serve. `changed` is called
    when an adapter has come or gone. Files are copied to this host's disk and kept there as long as the adapter: the
    engine reads them again when it has forgotten it.
    """

    def __init__(
        self,
        model: str,
        source: ArtifactSource,
        hold: Callable[[], AbstractContextManager[Engine]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._source = source
        self._hold = hold
        self._changed = changed
        self._entries: dict[str, _Entry] = {}
        self._ids = itertools.count(1)

    def list(self) -> tuple[Adapter, ...]:
        """Returns every loaded adapter as it is now, by name."""
        loaded = (self._entries[name].now() for name in sorted(self._entries))
        return tuple(adapter for adapter in loaded if adapter is not None)

    async def load(self, request: AdapterRequest, base: ObjectStore) -> Adapter:
        """Loads an adapter of the model whose files are in `base`, and returns it.

        It goes on when the caller leaves; equal requests share one load. `FailedPreconditionError` LORA_NOT_ENABLED, or
        with what does not fit (see `check_adapter`); `DataLossError` ADAPTER_DIGEST_MISMATCH; `AlreadyExistsError` when
        the name is taken by another digest.
        """
        self._require_lora()
        while (there := self._entries.get(request.name)) is not None:
            there.raise_if_draining()
            shared = not there.loading.done() and _same(there.request, request)
            await asyncio.wait({there.loading})
            if shared:
                return there.result()
            equal = there.adapter is not None and await self._has_digest(there.adapter.digest, request)
            # It may have gone meanwhile, and another one may be there.
            if self._entries.get(request.name) is there:
                there.raise_if_draining()
                if equal:
                    return there.result()
                raise self._exists(there)
        entry = self._entries[request.name] = _Entry(request)
        entry.loading = asyncio.create_task(self._load(entry, base))
        await asyncio.wait({entry.loading})
        return entry.result()

    async def unload(self, name: str) -> None:
        """Refuses new calls with it, waits for the running ones, removes it. It goes on when the caller leaves."""
        entry = self._entry(name)
        if entry.unloading is None:
            entry.unloading = asyncio.create_task(self._unload(entry))
        await asyncio.shield(entry.unloading)

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[LocalAdapter]:
        """Holds an adapter; it is not removed before the lease ends.

        Raises `NotFoundError`, or `UnavailableError` for one that is being loaded or unloaded.
        """
        entry = self._entry(name)
        entry.raise_if_draining()
        if entry.local is None:
            raise UnavailableError("ADAPTER_LOADING", f"adapter {name!r} is being loaded", self._metadata(name))
        entry.leases += 1
        entry.idle.clear()
        try:
            yield entry.local
        finally:
            entry.leases -= 1
            if not entry.leases:
                entry.idle.set()

    async def restore(self, engine: Engine) -> None:
        """Gives every adapter to an engine that was started in place of another. Raises as `Engine.add_adapter`."""
        for entry in list(self._entries.values()):
            if entry.local is None or entry.unloading is not None:
                continue
            try:
                await engine.add_adapter(entry.local)
            except FailedPreconditionError as error:
                # Without it the model can serve; it fits no longer, as when its files were damaged.
                log.error("adapter_lost", model=self._model, adapter=entry.request.name, message=error.message)
                self._forget(entry)
                await entry.release()

    def give_up(self) -> None:
        """Gives up what loads."""
        for entry in self._entries.values():
            entry.given_up.set()
            entry.loading.cancel()

    async def close(self) -> None:
        """Gives up what loads and removes every copy. The engine, which no call uses any more, is not asked."""
        self.give_up()
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.idle.set()
        tasks = [task for entry in entries for task in (entry.loading, entry.unloading) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for entry in entries:
            await entry.release()

    def _require_lora(self) -> int:
        with self._hold() as engine:
            max_rank = engine.info.max_lora_rank
        if not max_rank:
            raise FailedPreconditionError(
                "LORA_NOT_ENABLED",
                f"model {self._model!r} was loaded without engine_options.enable_lora and takes no adapters",
                {"model": self._model},
            )
        return max_rank

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            names = ", ".join(adapter.name for adapter in self.list())
            raise NotFoundError(
                "ADAPTER_NOT_FOUND",
                f"model {self._model!r} has no adapter {name!r}; loaded: {names or 'none'}",
                self._metadata(name) | {"adapters": names},
            )
        return entry

    def _metadata(self, name: str) -> dict[str, str]:
        return {"model": self._model, "adapter": name}

    def _exists(self, entry: _Entry) -> AlreadyExistsError:
        digest = entry.adapter.digest if entry.adapter else ""
        name = entry.request.name
        return AlreadyExistsError(
            "ADAPTER_EXISTS",
            f"adapter {name!r} of model {self._model!r} is another one, from {entry.request.store.uri} with digest "
            f"{digest}; unload it first or choose another name",
            self._metadata(name) | {"digest": digest, "uri": entry.request.store.uri},
        )

    async def _has_digest(self, digest: str, request: AdapterRequest) -> bool:
        if request.digest:
            return request.digest == digest
        copy = await in_thread(self._copy, request, threading.Event(), undo=LocalModel.release)
        try:
            return await in_thread(_digest, copy) == digest
        finally:
            await in_thread(copy.release)

    async def _load(self, entry: _Entry, base: ObjectStore) -> None:
        request = entry.request
        try:
            await self._bring_up(entry, base)
        except BitmillError as error:
            entry.failure = error
        except asyncio.CancelledError:
            entry.failure = _given_up()
        except Exception as error:
            log.error("adapter_load_crashed", model=self._model, adapter=request.name, exc_info=error)
            entry.failure = InternalError("LOAD_CRASHED", "the load failed; the server's log has it")
        if entry.failure is None:
            self._changed()
            return
        log.warning("adapter_failed", model=self._model, adapter=request.name, reason=entry.failure.reason)
        self._forget(entry)
        await entry.release()

    async def _bring_up(self, entry: _Entry, base: ObjectStore) -> None:
        request = entry.request
        entry.files = await in_thread(self._copy, request, entry.given_up, undo=LocalModel.release)
        digest = await in_thread(_digest, entry.files)
        if request.digest and digest != request.digest:
            raise DataLossError(
                "ADAPTER_DIGEST_MISMATCH",
                f"the adapter {request.store.uri} has the digest {digest}, not {request.digest}",
                {"uri": request.store.uri, "digest": digest, "expected_digest": request.digest},
            )
        rank = await in_thread(_check, entry.files.store, request.store.uri, base, self._require_lora())
        local = LocalAdapter(request.name, next(self._ids), entry.files.directory, rank)
        with self._hold() as engine:
            await engine.add_adapter(local)
        entry.adapter = Adapter(request.name, request.store.uri, digest, rank, datetime.now(UTC))
        entry.local = local
        log.info("adapter_loaded", model=self._model, adapter=request.name, digest=digest)

    def _copy(self, request: AdapterRequest, given_up: threading.Event) -> LocalModel:
        def on_bytes(count: int) -> None:
            if given_up.is_set():
                raise CancelledError("LOAD_GIVEN_UP", "the model was unloaded while its adapter was loading")

        return self._source.fetch_files(request.store, request.name, _files(request.store), on_bytes)

    async def _unload(self, entry: _Entry) -> None:
        await asyncio.wait({entry.loading})
        await entry.idle.wait()
        if entry.local is not None:
            await self._remove(entry.local)
        self._forget(entry)
        await entry.release()
        log.info("adapter_unloaded", model=self._model, adapter=entry.request.name)

    async def _remove(self, local: LocalAdapter) -> None:
        """An adapter that stays in the engine does no harm: no call can name it, and its id does not come again."""
        try:
            with self._hold() as engine:
                await engine.remove_adapter(local)
        except UnavailableError:
            pass  # An engine that has died, or whose model is being unloaded, has no adapter any more.
        except BitmillError as error:
            log.warning("adapter_not_removed", model=self._model, adapter=local.name, message=error.message)

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.request.name) is entry:
            del self._entries[entry.request.name]
            self._changed()


class _Entry:
    """An adapter, its files, and who uses it."""

    def __init__(self, request: AdapterRequest) -> None:
        self.request = request
        self.loading: asyncio.Task[None]
        self.unloading: asyncio.Task[None] | None = None
        self.adapter: Adapter | None = None
        self.local: LocalAdapter | None = None
        self.files: LocalModel | None = None
        self.failure: BitmillError | None = None
        self.given_up = threading.Event()
        self.leases = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def now(self) -> Adapter | None:
        """The adapter as it is now; None while it loads."""
        return replace(self.adapter, running_calls=self.leases) if self.adapter is not None else None

    def result(self) -> Adapter:
        """What the load came to."""
        if self.failure is not None:
            raise self.failure
        adapter = self.now()
        if adapter is None:
            raise _given_up()
        return adapter

    def raise_if_draining(self) -> None:
        """Raises `UnavailableError` once the adapter is being unloaded."""
        if self.unloading is not None:
            name = self.request.name
            raise UnavailableError("ADAPTER_DRAINING", f"adapter {name!r} is being unloaded", {"adapter": name})

    async def release(self) -> None:
        """Gives the files back."""
        files, self.files = self.files, None
        if files is not None:
            await in_thread(files.release)


def _given_up() -> UnavailableError:
    return UnavailableError("LOAD_GIVEN_UP", "the model was unloaded, or the server is stopping")


def _same(one: AdapterRequest, other: AdapterRequest) -> bool:
    return (one.store.uri, one.digest) == (other.store.uri, other.digest)


def _files(store: ObjectStore) -> Sequence[ObjectInfo]:
    """Returns the two files of the adapter that `store` is rooted at."""
    metadata = {"uri": store.uri}
    config, weights = _head(store, CONFIG), _head(store, WEIGHTS)
    if weights is None and any(_head(store, name) for name in PICKLES):
        message = f"the adapter {store.uri} has pickled weights alone, which can run code; convert to safetensors"
        raise FailedPreconditionError("PICKLE_ONLY", message, metadata)
    if config is None or weights is None:
        missing = [name for name, info in ((CONFIG, config), (WEIGHTS, weights)) if info is None]
        message = f"there is no adapter {store.uri}: it has no {' and no '.join(missing)}"
        raise FailedPreconditionError("ADAPTER_FILES_MISSING", message, metadata | {"files": ", ".join(missing)})
    return [config, weights]


def _head(store: ObjectStore, path: str) -> ObjectInfo | None:
    try:
        return store.head(path)
    except NotFoundError:
        return None


def _digest(files: LocalModel) -> str:
    """The digest of an adapter: that of a content, over its configuration and its weights."""
    return content_digest(artifacts.describe_files(files.directory))


def _check(adapter: ObjectStore, uri: str, base: ObjectStore, max_rank: int) -> int:
    return check_adapter(adapter, uri, inspect_checkpoint(base), max_rank)
