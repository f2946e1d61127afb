"""A quantization job as its callers see it. Plain data; where it is kept is the job board's affair."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime

from bitmill_quantizer.recipes.specs import QuantizationSpec


class JobState(enum.Enum):
    """State of a job. The last three are final."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether a job in this state never changes again."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class JobPhase(enum.Enum):
    """What a running job does, in this order."""

    RESOLVE = "RESOLVE"
    FETCH = "FETCH"
    PREFLIGHT = "PREFLIGHT"
    QUANTIZE = "QUANTIZE"
    EVALUATE = "EVALUATE"
    SAVE = "SAVE"
    VERIFY = "VERIFY"
    UPLOAD = "UPLOAD"
    PUBLISH = "PUBLISH"


@dataclass(frozen=True)
class Progress:
    """How far a phase is. `total` 0: not known. `unit`: "layers", "tokens", "bytes" or "files".

    `loss`: mean GPTQ reconstruction loss of the layer just done, where the engine tells it.
    """

    completed: int = 0
    total: int = 0
    unit: str = ""
    loss: float | None = None


@dataclass(frozen=True)
class JobError:
    """Why a job failed."""

    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One job. Times are in UTC; `start_time` is when a worker took it first."""

    job_id: str
    spec: QuantizationSpec
    state: JobState
    create_time: datetime
    phase: JobPhase | None = None
    progress: Progress | None = None
    error: JobError | None = None
    artifact_uri: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None


@dataclass(frozen=True)
class JobEvent:
    """One step in a job's history: its position from 1, when it happened, and the job as of then."""

    sequence: int
    time: datetime
    job: Job


@dataclass(frozen=True)
class JobPosition:
    """Where a page of jobs ends: the sort key of its last job, which is the board's own to make and to read."""

    key: tuple[int, int, str]


@dataclass(frozen=True)
class JobList:
    """A part of the list of jobs, newest first, and where to go on; None at the end."""

    jobs: tuple[Job, ...]
    next_position: JobPosition | None


@dataclass(frozen=True)
class History:
    """A part of a job's history. `is_complete`: it goes up to the event with the final state."""

    events: tuple[JobEvent, ...]
    is_complete: bool


class JobStoppedError(BaseException):
    """Ends a phase from inside. No `Exception`, so that no phase takes it for a failure of its own."""


class JobCancelledError(JobStoppedError):
    """The job was cancelled."""


class JobInterruptedError(JobStoppedError):
    """The server stops; the job goes on when it starts again."""
