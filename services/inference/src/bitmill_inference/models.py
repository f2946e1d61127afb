"""The models of this server: load, serve, watch, drain, unload. One event loop calls everything here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from bitmill_common.errors import (
    AlreadyExistsError,
    BitmillError,
    CancelledError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from bitmill_common.object_store import ObjectStore
from bitmill_inference.artifact_source import ArtifactSource, LocalModel
from bitmill_inference.devices import require_device
from bitmill_inference.engine_options import EngineOptions, check_engine_options
from bitmill_inference.model import MODEL_NAME, MODEL_NAME_RULE, LoadPhase, Model, ModelError, ModelState
from bitmill_inference.ports import Engine, EngineFactory, ModelHealth
from bitmill_inference.prompts import TokensPrompt
from bitmill_inference.sampling import SamplingParams
from bitmill_inference.violations import Violations

log = structlog.get_logger("bitmill.models")

# With log probabilities: on a fresh machine vLLM compiles what they need at their first use, and every stream of the
# model would stand still for that long (25 s on two cores).
WARM_UP = SamplingParams(max_tokens=1, logprobs=1)


class Models:
    """Every model of this server by name, each with an engine of its own."""

    def __init__(self, source: ArtifactSource, engines: EngineFactory, health: ModelHealth) -> None:
        self._source = source
        self._engines = engines
        self._health = health
        self._entries: dict[str, _Entry] = {}
        self._stopping = False

    async def load(self, name: str, uri: str, options: EngineOptions, *, wait: bool = True) -> Model:
        """Loads a model and returns it SERVING, or without `wait` as soon as it is LOADING.

        The load goes on when the caller leaves. Equal requests share one load; `AlreadyExistsError` when the name is
        taken by another URI or other options. A model that failed may be loaded again with whatever.
        """
        _validate_load(name, options)
        store = self._source.open(uri, "uri")
        if not name:
            name = await self._default_name(store)
        entry = self._entry_to_load(Model(name, store.uri, options, _now()), store)
        if wait:
            await asyncio.wait({entry.loading})
            self._raise_if_stopping()
            entry.raise_unless_serving()
        return entry.model

    async def unload(self, name: str) -> None:
        """Refuses new calls, waits for the running ones, stops the engine. It goes on when the caller leaves."""
        entry = self._entry(name)
        if entry.unloading is None:
            entry.unloading = asyncio.create_task(self._unload(entry))
        await asyncio.shield(entry.unloading)

    def get(self, name: str) -> Model:
        """Returns one model. Raises `NotFoundError`."""
        return self._entry(name).model

    def list(self) -> list[Model]:
        """Returns every model, by name."""
        return [self._entries[name].model for name in sorted(self._entries)]

    async def watch(self, name: str) -> AsyncIterator[Model]:
        """Yields the model as it is and then each change, and ends after UNLOADED. Raises `NotFoundError`.

        `UnavailableError` SERVER_STOPPING when the server drains.
        """
        entry = self._entry(name)
        changes: asyncio.Queue[Model] = asyncio.Queue()
        changes.put_nowait(entry.model)
        watchers = entry.watchers
        watchers.add(changes)
        try:
            while True:
                model = await changes.get()
                self._raise_if_stopping()
                yield model
                if model.state is ModelState.UNLOADED:
                    return
        finally:
            watchers.discard(changes)

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Engine]:
        """Holds the engine of a serving model; the model is not stopped before the lease ends.

        An empty name means the one model there is. Raises `NotFoundError`, or `UnavailableError` for a model that does
        not serve.
        """
        entry = self._entry(name or self._only_name())
        engine = entry.serving_engine()
        entry.leases += 1
        entry.idle.clear()
        try:
            yield engine
        finally:
            entry.leases -= 1
            if not entry.leases:
                entry.idle.set()

    def begin_stopping(self) -> None:
        """Gives up the loads and ends the watches, whose callers a drain need not wait for."""
        self._stopping = True
        for entry in self._entries.values():
            entry.given_up.set()
            if entry.model.state is ModelState.LOADING:
                entry.loading.cancel()
            entry.change()

    async def stop(self) -> None:
        """Stops every engine, without waiting for calls, and forgets the models."""
        entries = list(self._entries.values())
        await asyncio.gather(*(self._take_down(entry) for entry in entries))
        for entry in entries:
            self._forget(entry)

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise UnavailableError("SERVER_STOPPING", "the server is stopping")

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError("MODEL_NOT_FOUND", f"no model {name!r}; loaded: {known}", {"model": name})
        return entry

    def _only_name(self) -> str:
        serving = [name for name, entry in self._entries.items() if entry.model.state is ModelState.SERVING]
        names = serving or list(self._entries)
        if not names:
            raise NotFoundError("MODEL_NOT_FOUND", "no model is loaded")
        if len(names) > 1:
            description = f"several models are loaded, name one of: {', '.join(sorted(names))}"
            raise InvalidArgumentError([FieldViolation("model", description, "MODEL_AMBIGUOUS")])
        return names[0]

    async def _default_name(self, store: ObjectStore) -> str:
        name = (await asyncio.to_thread(self._source.resolve, store)).name
        if not MODEL_NAME.fullmatch(name):
            description = f"is needed: {name!r}, taken from the URI, is not {MODEL_NAME_RULE}"
            raise InvalidArgumentError([FieldViolation("name", description, "INVALID_NAME")])
        return name

    def _entry_to_load(self, model: Model, store: ObjectStore) -> _Entry:
        there = self._entries.get(model.name)
        entry = _Entry(model)
        if there is not None:
            if there.model.state is ModelState.DRAINING:
                raise there.unavailable()
            if there.model.state is not ModelState.FAILED:
                if (there.model.uri, there.model.options) == (model.uri, model.options):
                    return there
                raise AlreadyExistsError(
                    "MODEL_EXISTS",
                    f"model {model.name!r} is {there.model.state.value} from {there.model.uri} with "
                    f"{there.model.options.set_values()}; unload it first or choose another name",
                    {"model": model.name, "uri": there.model.uri},
                )
            entry.watchers = there.watchers
        self._entries[model.name] = entry
        entry.change()
        entry.loading = asyncio.create_task(self._load(entry, store))
        return entry

    async def _load(self, entry: _Entry, store: ObjectStore) -> None:
        log.info("model_loading", model=entry.model.name, uri=entry.model.uri)
        try:
            await self._bring_up(entry, store)
        except BitmillError as error:
            await self._fail(entry, error)
        except Exception as error:
            log.error("model_load_crashed", model=entry.model.name, exc_info=error)
            await self._fail(entry, InternalError("LOAD_CRASHED", "the load failed; the server's log has it"))

    async def _bring_up(self, entry: _Entry, store: ObjectStore) -> None:
        name = entry.model.name
        await self._health.set_serving(name, False)
        source = await asyncio.to_thread(self._source.resolve, store)
        entry.change(digest=source.digest)
        if source.manifest is not None:
            device = await asyncio.to_thread(self._engines.device)
            require_device(source.manifest.devices, device, f"the {source.manifest.recipe.scheme.value} artifact")
        entry.change(phase=LoadPhase.FETCH)
        entry.local = await asyncio.to_thread(self._source.fetch, source, entry.on_bytes)
        entry.change(phase=LoadPhase.VERIFY)
        await asyncio.to_thread(self._source.verify, source, entry.local, entry.on_bytes)
        entry.change(phase=LoadPhase.START_ENGINE)
        engine = entry.engine = await self._engines.start(entry.local.directory, entry.model.options)
        entry.change(phase=LoadPhase.WARM_UP)
        async for _ in engine.generate(TokensPrompt((0,)), WARM_UP, stream=False):
            pass
        entry.dying = asyncio.create_task(self._fail_when_dead(entry, engine))
        await self._health.set_serving(name, True)
        info = engine.info
        entry.change(
            state=ModelState.SERVING,
            phase=None,
            max_model_len=info.max_model_len,
            quantization=info.quantization,
            serving_time=_now(),
        )
        log.info("model_serving", model=name, uri=entry.model.uri, digest=entry.model.digest)

    async def _fail_when_dead(self, entry: _Entry, engine: Engine) -> None:
        await engine.died()
        entry.dying = None
        await self._fail(entry, UnavailableError("ENGINE_DIED", "the engine has died; load the model again"))

    async def _fail(self, entry: _Entry, error: BitmillError) -> None:
        entry.failure = error
        log.error("model_failed", model=entry.model.name, reason=error.reason, message=error.message)
        if entry.unloading is None:
            entry.change(
                state=ModelState.FAILED, phase=None, error=ModelError(error.reason, error.message, error.metadata)
            )
        await self._health.set_serving(entry.model.name, False)
        await entry.release()

    async def _unload(self, entry: _Entry) -> None:
        entry.change(state=ModelState.DRAINING, phase=None)
        await self._health.set_serving(entry.model.name, False)
        await entry.idle.wait()
        await self._take_down(entry)
        self._forget(entry)

    async def _take_down(self, entry: _Entry) -> None:
        entry.given_up.set()
        for task in (entry.loading, entry.dying):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await entry.release()

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.model.name) is not entry:
            return
        del self._entries[entry.model.name]
        entry.change(state=ModelState.UNLOADED, phase=None, error=None)
        log.info("model_unloaded", model=entry.model.name)


class _Entry:
    """A model, its engine, and who uses and watches it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.loading: asyncio.Task[None]
        self.unloading: asyncio.Task[None] | None = None
        self.dying: asyncio.Task[None] | None = None
        self.engine: Engine | None = None
        self.local: LocalModel | None = None
        self.failure: BitmillError | None = None
        self.watchers: set[asyncio.Queue[Model]] = set()
        self.given_up = threading.Event()
        self.leases = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def change(self, **changes: Any) -> None:
        """Changes the model and tells the watchers."""
        self.model = replace(self.model, **changes)
        for watcher in self.watchers:
            watcher.put_nowait(self.model)

    def on_bytes(self, count: int) -> None:
        """Gives a transfer up, in its thread, once nobody wants the model any more."""
        if self.given_up.is_set():
            raise CancelledError("LOAD_GIVEN_UP", "the model was unloaded while it was loading")

    def serving_engine(self) -> Engine:
        """Returns the engine, or raises `UnavailableError` saying what the model is doing instead."""
        if self.model.state is not ModelState.SERVING or self.engine is None:
            raise self.unavailable()
        return self.engine

    def unavailable(self) -> UnavailableError:
        """The error of calls to a model that does not serve."""
        state = self.model.state.value
        detail = f": {self.model.error.message}" if self.model.error else ""
        return UnavailableError(
            f"MODEL_{state.upper()}", f"model {self.model.name!r} is {state}{detail}", {"model": self.model.name}
        )

    def raise_unless_serving(self) -> None:
        """Raises what the load failed with, or that it was given up."""
        if self.failure is not None:
            raise self.failure
        if self.model.state is not ModelState.SERVING:
            raise self.unavailable()

    async def release(self) -> None:
        """Stops the engine and gives the files back."""
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.stop()
        local, self.local = self.local, None
        if local is not None:
            await asyncio.to_thread(local.release)


def _validate_load(name: str, options: EngineOptions) -> None:
    violations = Violations()
    if name and not MODEL_NAME.fullmatch(name):
        violations.add("name", f"must be {MODEL_NAME_RULE}", "INVALID_NAME")
    check_engine_options(options, violations)
    violations.raise_if_any()


def _now() -> datetime:
    return datetime.now(UTC)
