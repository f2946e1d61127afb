"""What is known about a model in this server. Plain data."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from datetime import datetime

from bitmill_inference.models.engine_options import EngineOptions

MODEL_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9]+([-_.][a-z0-9]+)*")
MODEL_NAME_RULE = '1 to 63 lower-case letters, digits and single "-", "_" or "." between them'


class ModelState(enum.Enum):
    """State of a model; `model.proto` says what each means."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    UNLOADED = "unloaded"
    RESTARTING = "restarting"
    SLEEPING = "sleeping"


# From each state to those that may follow it. DRAINING leads to SLEEPING too, or to RESTARTING when the engine dies on
# the way there.
TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    ModelState.LOADING: frozenset({ModelState.SERVING, ModelState.FAILED, ModelState.DRAINING, ModelState.UNLOADED}),
    ModelState.SERVING: frozenset({ModelState.DRAINING, ModelState.RESTARTING, ModelState.UNLOADED}),
    ModelState.DRAINING: frozenset(
        {ModelState.DRAINING, ModelState.SLEEPING, ModelState.RESTARTING, ModelState.UNLOADED}
    ),
    ModelState.FAILED: frozenset({ModelState.DRAINING, ModelState.UNLOADED}),
    ModelState.RESTARTING: frozenset(
        {ModelState.RESTARTING, ModelState.SERVING, ModelState.DRAINING, ModelState.UNLOADED}
    ),
    ModelState.SLEEPING: frozenset(
        {ModelState.SERVING, ModelState.RESTARTING, ModelState.DRAINING, ModelState.UNLOADED}
    ),
    ModelState.UNLOADED: frozenset(),
}


class LoadPhase(enum.Enum):
    """What a loading model does at the moment, in this order."""

    RESOLVE = "resolve"
    FETCH = "fetch"
    VERIFY = "verify"
    START_ENGINE = "start_engine"
    WARM_UP = "warm_up"


@dataclass(frozen=True)
class ModelError:
    """Why a model failed."""

    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadProgress:
    """Bytes done and to do in a phase of a load; 0 to do where the phase does not count bytes."""

    completed_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model at one moment."""

    name: str
    uri: str
    digest: str
    rank: int
    load_time: datetime
    running_calls: int = 0


@dataclass(frozen=True)
class ModelLoad:
    """What a model's engine does at the moment; `model.proto` says what each number means."""

    model: str
    state: ModelState
    running_requests: int = 0
    waiting_requests: int = 0
    kv_cache_usage: float = 0
    prompt_tokens_per_second: float = 0
    generation_tokens_per_second: float = 0
    refused_calls: int = 0
    max_num_seqs: int = 0
    max_num_queued_reqs: int = 0


@dataclass(frozen=True)
class Model:
    """A model at one moment. `options` are those that LoadModel gave; `digest` is empty for a plain checkpoint."""

    name: str
    uri: str
    options: EngineOptions
    create_time: datetime
    state: ModelState = ModelState.LOADING
    phase: LoadPhase | None = LoadPhase.RESOLVE
    digest: str = ""
    error: ModelError | None = None
    max_model_len: int = 0
    quantization: str = ""
    serving_time: datetime | None = None
    aliases: tuple[str, ...] = ()
    progress: LoadProgress = LoadProgress()
    supported_tasks: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    restarts: int = 0
    restart_time: datetime | None = None
