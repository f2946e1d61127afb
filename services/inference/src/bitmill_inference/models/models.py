"""The models of this server by name: load, serve, alias, watch, sleep, drain, unload. One event loop calls all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import structlog

from bitmill_common.errors import (
    AlreadyExistsError,
    BitmillError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from bitmill_common.object_store import ObjectStore
from bitmill_inference.artifacts.artifact_source import ArtifactSource
from bitmill_inference.models import sleeping
from bitmill_inference.models.adapter_files import adapter_request
from bitmill_inference.models.engine_options import EngineOptions, check_engine_options
from bitmill_inference.models.loading import ModelLoader
from bitmill_inference.models.model import MODEL_NAME, MODEL_NAME_RULE, Adapter, Model, ModelState
from bitmill_inference.models.model_entry import Lease, ModelEntry, ModelUse, model_error, now
from bitmill_inference.models.model_table import ModelTable
from bitmill_inference.models.supervisor import RestartPolicy, Supervisor
from bitmill_inference.ports import EngineFactory, ModelHealth
from bitmill_inference.requests.violations import Violations

log = structlog.get_logger("bitmill.models")

# States that a wake or a restart leads out of without anyone's help.
_ON_THE_WAY = frozenset({ModelState.SLEEPING, ModelState.RESTARTING})


class Models:
    """Every model of this server by name, each with an engine of its own. `defaults`: options of the settings."""

    def __init__(
        self,
        source: ArtifactSource,
        engines: EngineFactory,
        health: ModelHealth,
        defaults: EngineOptions = EngineOptions(),  # noqa: B008  # immutable
        restarts: RestartPolicy = RestartPolicy(),  # noqa: B008  # immutable
    ) -> None:
        self._source = source
        self._engines = engines
        self._health = health
        self._loader = ModelLoader(source, engines, defaults)
        self._restarts = restarts
        self._table = ModelTable()
        self._stopping = False

    async def load(
        self,
        name: str,
        uri: str,
        options: EngineOptions,
        *,
        aliases: Sequence[str] = (),
        unload_replaced: bool = False,
        wait: bool = True,
    ) -> Model:
        """Loads a model and returns it SERVING, or without `wait` as soon as it is LOADING.

        The load goes on when the caller leaves. Equal requests share one load; `AlreadyExistsError` when the name is
        taken by another URI or other options. A model that failed may be loaded again with whatever. The model gets
        the `aliases` in the moment in which it serves; with `unload_replaced` the models that this leaves without one
        are unloaded then.
        """
        self._validate(name, aliases, options)
        store = self._source.open(uri, "uri")
        if not name:
            name = await self._default_name(store)
            self._validate(name, aliases, options)
        self._raise_if_stopping()
        entry = self._entry_to_load(Model(name, store.uri, options, now()), store)
        if entry.state not in (ModelState.LOADING, ModelState.SERVING):
            raise entry.unavailable()
        entry.wanted_aliases = tuple(dict.fromkeys((*entry.wanted_aliases, *aliases)))
        entry.unload_replaced = entry.unload_replaced or unload_replaced
        if entry.state is ModelState.SERVING:
            self._give_wanted_aliases(entry)
            await entry.publish_health()
        elif wait and entry.loading is not None:
            await asyncio.wait({entry.loading})
            self._raise_if_stopping()
        if wait:
            entry.raise_unless_serving()
        return entry.model

    async def unload(self, name: str) -> None:
        """Refuses new calls, waits for the running ones, stops the engine. It goes on when the caller leaves."""
        await asyncio.shield(self._begin_unload(self._table.get(name)))

    def get(self, name: str) -> Model:
        """Returns one model. Raises `NotFoundError`."""
        return self._table.get(name).now()

    def list(self) -> list[Model]:
        """Returns every model, by name."""
        return [entry.now() for entry in self._table.all()]

    def in_use(self, name: str = "") -> Sequence[ModelUse]:
        """Returns one model, by name or alias, with its engine, or without a name every one by name.

        Raises `NotFoundError`.
        """
        return [entry.use() for entry in ([self._table.named(name)] if name else self._table.all())]

    async def watch(self, name: str) -> AsyncIterator[Model]:
        """Yields the model as it is and then each change, and ends after UNLOADED. Raises `NotFoundError`.

        A reader that is slow misses states between, and never the latest. `UnavailableError` SERVER_STOPPING when the
        server drains.
        """
        with self._table.get(name).watch() as watch:
            while True:
                model = await watch.get()
                self._raise_if_stopping()
                yield model
                if model.state is ModelState.UNLOADED:
                    return

    @contextlib.contextmanager
    def lease(self, name: str, adapter: str = "") -> Iterator[Lease]:
        """Holds a serving model, by name or alias, and an adapter of it; neither is stopped before the lease ends.

        An empty name means the one model there is. Raises `NotFoundError`, or `UnavailableError` for a model that does
        not serve.
        """
        with self._table.named_or_only(name).lease(adapter) as lease:
            yield lease

    async def set_alias(self, alias: str, name: str) -> Model:
        """Lets an alias lead to a serving model, from wherever it led before, and returns the model."""
        violations = Violations()
        self._table.check_alias(alias, violations)
        violations.raise_if_any()
        entry = self._table.get(name)
        if entry.state is not ModelState.SERVING:
            raise entry.unavailable()
        self._table.move_aliases([alias], entry)
        await entry.publish_health()
        return entry.model

    async def delete_alias(self, alias: str) -> None:
        """Removes an alias. Raises `NotFoundError`."""
        self._table.remove_alias(alias)
        await self._health.set_serving(alias, False)

    async def load_adapter(self, model: str, name: str, uri: str, digest: str) -> Adapter:
        """Loads an adapter of a serving model, by name or alias, and returns it. Errors as of `Adapters.load`."""
        entry = self._table.named_or_only(model)
        request = adapter_request(self._source, entry.name, name, uri, digest)
        if entry.local is None:
            raise entry.unavailable()
        return await entry.adapters.load(request, entry.local.store)

    async def unload_adapter(self, model: str, name: str) -> None:
        """Refuses new calls with an adapter, waits for the running ones, removes it. Raises `NotFoundError`."""
        await self._table.named_or_only(model).adapters.unload(name)

    async def sleep(self, name: str) -> Model:
        """Drains a model, by name or alias, frees its memory on the device, and returns it SLEEPING.

        Raises `FailedPreconditionError` when it was loaded without enable_sleep_mode, `UnavailableError` when it does
        not serve.
        """
        entry = self._table.named(name)
        await sleeping.sleep(entry)
        return entry.model

    async def wake(self, name: str) -> Model:
        """Wakes a model, by name or alias, and returns it SERVING, if need be after a restart of its engine."""
        entry = self._table.named(name)
        await sleeping.wake(entry)
        await entry.until(lambda model: self._stopping or model.state not in _ON_THE_WAY)
        self._raise_if_stopping()
        entry.raise_unless_serving()
        return entry.model

    def begin_stopping(self) -> None:
        """Gives up loads, restarts and sleeps, and ends the watches, whose callers a drain need not wait for."""
        self._stopping = True
        for entry in self._table.all():
            entry.give_up()
            entry.admission.window.release()
            entry.change()

    async def stop(self) -> None:
        """Stops every engine, without waiting for calls, and forgets the models."""
        self._stopping = True
        entries = self._table.all()
        await asyncio.gather(*(self._take_down(entry) for entry in entries))
        for entry in entries:
            self._forget(entry)

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise UnavailableError("SERVER_STOPPING", "the server is stopping")

    def _validate(self, name: str, aliases: Sequence[str], options: EngineOptions) -> None:
        violations = Violations()
        self._table.check_load(name, aliases, violations)
        check_engine_options(options, violations)
        self._engines.check_options(options, violations)
        violations.raise_if_any()

    async def _default_name(self, store: ObjectStore) -> str:
        name = (await asyncio.to_thread(self._source.resolve, store)).name
        if not MODEL_NAME.fullmatch(name):
            description = f"is needed: {name!r}, taken from the URI, is not {MODEL_NAME_RULE}"
            raise InvalidArgumentError([FieldViolation("name", description, "INVALID_NAME")])
        return name

    def _entry_to_load(self, model: Model, store: ObjectStore) -> ModelEntry:
        there = self._table.find(model.name)
        entry = ModelEntry(model, store, self._health, self._source)
        if there is not None:
            if there.state is ModelState.DRAINING:
                raise there.unavailable()
            if there.state is not ModelState.FAILED:
                if (there.model.uri, there.model.options) == (model.uri, model.options):
                    return there
                raise AlreadyExistsError(
                    "MODEL_EXISTS",
                    f"model {model.name!r} is {there.state.value} from {there.model.uri} with "
                    f"{there.model.options.set_values()}; unload it first or choose another name",
                    {"model": model.name, "uri": there.model.uri},
                )
            entry.watches = there.watches
        self._table.put(entry)
        entry.change()
        entry.loading = asyncio.create_task(self._load(entry, there.loading if there else None))
        return entry

    async def _load(self, entry: ModelEntry, failing: asyncio.Task[None] | None) -> None:
        if failing is not None:
            # It may still be giving back what it had.
            await asyncio.wait({failing})
        log.info("model_loading", model=entry.name, uri=entry.model.uri)
        try:
            await entry.publish_health()
            await self._loader.load(entry)
        except BitmillError as error:
            await self._fail(entry, error)
        except Exception as error:
            log.error("model_load_crashed", model=entry.name, exc_info=error)
            await self._fail(entry, InternalError("LOAD_CRASHED", "the load failed; the server's log has it"))
        else:
            await self._serve(entry)

    async def _serve(self, entry: ModelEntry) -> None:
        if entry.engine is None:
            raise AssertionError("a model that was loaded has an engine")
        info = entry.engine.info
        supervisor = Supervisor(entry, self._loader.start_engine, self._restarts)
        entry.supervising = asyncio.create_task(supervisor.run())
        entry.enter_now(
            ModelState.SERVING,
            max_model_len=info.max_model_len,
            quantization=info.quantization,
            supported_tasks=info.supported_tasks,
            serving_time=now(),
        )
        # Without a pause between: calls of an alias go to the old model until the new one serves, then to this one.
        self._give_wanted_aliases(entry)
        await entry.publish_health()
        log.info("model_serving", model=entry.name, uri=entry.model.uri, digest=entry.model.digest)

    def _give_wanted_aliases(self, entry: ModelEntry) -> None:
        replaced = self._table.move_aliases(entry.wanted_aliases, entry)
        for other in replaced if entry.unload_replaced else ():
            if not other.model.aliases:
                self._begin_unload(other)
        entry.wanted_aliases, entry.unload_replaced = (), False

    async def _fail(self, entry: ModelEntry, error: BitmillError) -> None:
        entry.failure = error
        entry.wanted_aliases = ()
        log.error("model_failed", model=entry.name, reason=error.reason, message=error.message)
        await entry.enter(ModelState.FAILED, error=model_error(error))
        await entry.release()

    def _begin_unload(self, entry: ModelEntry) -> asyncio.Task[None]:
        if entry.unloading is None:
            entry.enter_now(ModelState.DRAINING)
            entry.wanted_aliases = ()
            entry.give_up()
            entry.unloading = asyncio.create_task(self._unload(entry))
        return entry.unloading

    async def _unload(self, entry: ModelEntry) -> None:
        await entry.publish_health()
        await entry.idle.wait()
        await self._take_down(entry)
        self._forget(entry)

    async def _take_down(self, entry: ModelEntry) -> None:
        entry.give_up()
        await entry.given_up()
        await entry.release()

    def _forget(self, entry: ModelEntry) -> None:
        if self._table.remove(entry):
            entry.enter_now(ModelState.UNLOADED)
            log.info("model_unloaded", model=entry.name)
