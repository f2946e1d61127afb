"""One model of this server: its state, its engine, its files, and who uses and watches it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from bitmill_common.errors import BitmillError, CancelledError, UnavailableError
from bitmill_common.object_store import ObjectStore, OnBytes
from bitmill_inference.artifacts.artifact_source import ArtifactSource, LocalModel
from bitmill_inference.models.adapters import Adapters
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.model import TRANSITIONS, LoadPhase, LoadProgress, Model, ModelError, ModelState
from bitmill_inference.models.watching import ByteCounter, Watch
from bitmill_inference.ports import Engine, LocalAdapter, ModelHealth
from bitmill_inference.requests.admission import ModelAdmission

log = structlog.get_logger("bitmill.models")

# While nobody knows better.
RETRY_AFTER = timedelta(seconds=1)
# Whatever the host's clock says, which may have been set back since a restart's time was told.
LONGEST_RETRY_AFTER = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Lease:
    """A call's hold on a serving model. `model` is the model's own name, whatever alias the call used."""

    model: str
    engine: Engine
    admission: ModelAdmission
    adapter: LocalAdapter | None = None


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model, its engine while it has one, and what it has of admission."""

    model: Model
    engine: Engine | None
    admission: ModelAdmission


class ModelEntry:
    """A model and all that belongs to it. One event loop calls everything here.

    `options` are the effective ones, known once the artifact is resolved; `fingerprint` is what the model said to a
    fixed prompt before it slept. The tasks: `loading` runs the first load, `supervising` the engine's life after it,
    `switching` a sleep or a wake, `unloading` the end.
    """

    def __init__(self, model: Model, store: ObjectStore, health: ModelHealth, source: ArtifactSource) -> None:
        self.model = model
        self.store = store
        self.adapters = Adapters(model.name, source, self.hold, lambda: self.change(adapters=self.adapters.list()))
        self.options = model.options
        self.admission = ModelAdmission()
        self.engine: Engine | None = None
        self.local: LocalModel | None = None
        self.failure: BitmillError | None = None
        self.wanted_aliases: tuple[str, ...] = ()
        self.unload_replaced = False
        self.loading: asyncio.Task[None] | None = None
        self.supervising: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self.unloading: asyncio.Task[None] | None = None
        self.watches: set[Watch] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.fingerprint: Sequence[float] = ()
        self._health = health
        self._condemned: asyncio.Queue[BitmillError] = asyncio.Queue()
        self._given_up = threading.Event()
        self._leases = 0
        self._engine_stop: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.model.name

    @property
    def state(self) -> ModelState:
        """The model's state."""
        return self.model.state

    def set_options(self, options: EngineOptions) -> None:
        """Sets the effective options, before the engine starts."""
        self.options = options
        self.admission.configure(options)

    def change(self, **changes: Any) -> None:
        """Changes the model and tells the watchers. Not for the state, which `enter` changes."""
        self.model = replace(self.model, **changes)
        for watch in self.watches:
            watch.put(self.model)

    async def enter(self, state: ModelState, **changes: Any) -> None:
        """Enters a state, which takes effect at once, and tells health of it. Whatever belonged to the last is reset.

        A transition that `TRANSITIONS` does not name is a fault of this server.
        """
        self.enter_now(state, **changes)
        await self.publish_health()

    def enter_now(self, state: ModelState, **changes: Any) -> None:
        """`enter` without telling health."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"model {self.name!r} cannot go from {self.state.value} to {state.value}")
        # Nothing comes any more that could fill the batch of those that are held back.
        self.admission.window.release()
        reset: dict[str, Any] = {"phase": None, "error": None, "restart_time": None, "progress": LoadProgress()}
        self.change(state=state, **reset | changes)

    def enter_phase(self, phase: LoadPhase) -> None:
        """Goes on to a phase of the load."""
        self.change(phase=phase, progress=LoadProgress())

    async def publish_health(self) -> None:
        """Tells health about the model under its name and each of its aliases."""
        for name in (self.name, *self.model.aliases):
            # An alias may move while another name is told.
            if name == self.name or name in self.model.aliases:
                await self._health.set_serving(name, self.state is ModelState.SERVING)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watch]:
        """A watch that begins with the model as it is."""
        watch = Watch()
        watch.put(self.model)
        watches = self.watches
        watches.add(watch)
        try:
            yield watch
        finally:
            watches.discard(watch)

    async def until(self, reached: Callable[[Model], bool]) -> None:
        """Returns once the model is as `reached` says."""
        with self.watch() as watch:
            while not reached(await watch.get()):
                pass

    @contextlib.contextmanager
    def counting(self, total_bytes: int) -> Iterator[OnBytes]:
        """Counts the bytes of a phase. What it yields is called in threads, and gives the phase up with `give_up`."""
        counter = ByteCounter(total_bytes, lambda progress: self.change(progress=progress))

        def on_bytes(count: int) -> None:
            if self._given_up.is_set():
                raise CancelledError("LOAD_GIVEN_UP", "the model was unloaded while it was loading")
            counter.add(count)

        yield on_bytes
        counter.finish()

    def now(self) -> Model:
        """The model at this moment, with the calls of its adapters."""
        return replace(self.model, adapters=self.adapters.list())

    def use(self) -> ModelUse:
        """The model as it is used now."""
        return ModelUse(self.model, self.engine, self.admission)

    @contextlib.contextmanager
    def lease(self, adapter: str) -> Iterator[Lease]:
        """Holds the engine and an adapter of it. Errors as of `hold` and `Adapters.lease`."""
        with self.hold() as engine, contextlib.ExitStack() as stack:
            local = stack.enter_context(self.adapters.lease(adapter)) if adapter else None
            yield Lease(self.name, engine, self.admission, local)

    @contextlib.contextmanager
    def hold(self) -> Iterator[Engine]:
        """Holds the engine, or raises `UnavailableError` saying what the model does instead."""
        if self.state is not ModelState.SERVING or self.engine is None:
            raise self.unavailable()
        self._leases += 1
        self.idle.clear()
        try:
            yield self.engine
        finally:
            self._leases -= 1
            if not self._leases:
                self.idle.set()

    def unavailable(self) -> UnavailableError:
        """The error of calls to a model that does not serve."""
        state = self.state.value
        detail = f": {self.model.error.message}" if self.model.error else ""
        wait = (self.model.restart_time or now()) - now()
        return UnavailableError(
            f"MODEL_{state.upper()}",
            f"model {self.name!r} is {state}{detail}",
            {"model": self.name},
            min(wait, LONGEST_RETRY_AFTER) if wait > timedelta(0) else RETRY_AFTER,
        )

    def raise_unless_serving(self) -> None:
        """Raises what the load failed with, or that it was given up."""
        if self.failure is not None:
            raise self.failure
        if self.state is not ModelState.SERVING:
            raise self.unavailable()

    def condemn(self, error: BitmillError) -> None:
        """Has the supervisor start the engine again although it lives: it cannot be trusted, as `error` says."""
        self._condemned.put_nowait(error)

    async def condemnation(self) -> BitmillError:
        """Returns once the engine is condemned."""
        return await self._condemned.get()

    def acquit(self) -> None:
        """Forgets what the engine was condemned for, before another one takes its place."""
        while not self._condemned.empty():
            self._condemned.get_nowait()

    def give_up(self) -> None:
        """Ends the load, the supervision, and a sleep or a wake; none of them changes the model any more."""
        self._given_up.set()
        self.adapters.give_up()
        for task in self._tasks():
            task.cancel()

    async def given_up(self) -> None:
        """Returns when what `give_up` ends has ended."""
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in (self.loading, self.supervising, self.switching) if task is not None]

    async def stop_engine(self) -> None:
        """Stops the engine. When the caller is cancelled meanwhile it goes on, and the next caller waits for it."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._engine_stop = asyncio.create_task(self._stop(engine))
        if self._engine_stop is not None:
            await asyncio.shield(self._engine_stop)

    async def _stop(self, engine: Engine) -> None:
        try:
            await engine.stop()
        except Exception as error:
            # Whoever waits goes on: an unload, a restart or the server's end.
            log.error("engine_stop_failed", model=self.name, exc_info=error)

    async def release(self) -> None:
        """Stops the engine and gives the files back."""
        await self.stop_engine()
        await self.adapters.close()
        local, self.local = self.local, None
        if local is not None:
            await asyncio.to_thread(local.release)


def model_error(error: BitmillError) -> ModelError:
    """An error as a model shows it."""
    return ModelError(error.reason, error.message, error.metadata)


def now() -> datetime:
    """The time."""
    return datetime.now(UTC)
