"""The adapters (LoRA) of one model: loaded, named by calls, unloaded. One event loop calls everything here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime

import structlog

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
from bitmill_common.object_store import ObjectStore
from bitmill_inference.artifacts.artifact_source import ArtifactSource, LocalModel
from bitmill_inference.models.adapter_files import AdapterRequest, adapter_digest, adapter_files, checked_rank
from bitmill_inference.models.model import Adapter
from bitmill_inference.models.threads import in_thread
from bitmill_inference.ports import Engine, LocalAdapter

log = structlog.get_logger("bitmill.models")


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
            return await in_thread(adapter_digest, copy) == digest
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
        digest = await in_thread(adapter_digest, entry.files)
        if request.digest and digest != request.digest:
            raise DataLossError(
                "ADAPTER_DIGEST_MISMATCH",
                f"the adapter {request.store.uri} has the digest {digest}, not {request.digest}",
                {"uri": request.store.uri, "digest": digest, "expected_digest": request.digest},
            )
        rank = await in_thread(checked_rank, entry.files.store, request.store.uri, base, self._require_lora())
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

        return self._source.fetch_files(request.store, request.name, adapter_files(request.store), on_bytes)

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
        except UnavailableError as error:
            # Died, or on its way out with its model: either way it has no adapter any more.
            log.info("adapter_gone_with_engine", model=self._model, adapter=local.name, reason=error.reason)
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
