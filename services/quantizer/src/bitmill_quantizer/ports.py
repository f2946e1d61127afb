"""What the quantizer's domain asks of the world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bitmill_common.artifact import COMPRESSED_TENSORS, DeviceSupport
from bitmill_common.measurements import CalibrationUse, Evaluation, ModuleResult, Sensitivity, Verification
from bitmill_common.recipes import Calibration, Recipe
from bitmill_quantizer.jobs.job import History, Job, JobList, JobPhase, JobPosition, JobState, Progress
from bitmill_quantizer.plans.durations import FinishedWork
from bitmill_quantizer.recipes.specs import QuantizationSpec

T = TypeVar("T")


class JobBoard(Protocol):
    """The durable queue of jobs and everything known about them. Calls block; any thread may make them."""

    def submit(self, job_id: str, spec: QuantizationSpec) -> Job:
        """Queues a job and returns it. A job that has this id already is returned as it is, with its own spec."""

    def find(self, job_id: str) -> Job | None:
        """Returns a job, or None when there is none."""

    def list(self, states: Sequence[JobState], limit: int, after: JobPosition | None) -> JobList:
        """Returns up to `limit` jobs that follow `after`, newest first; with `states` only those in one of them."""

    def history(self, job_id: str, after_sequence: int) -> History | None:
        """Returns the events after `after_sequence`, or None when there is no such job."""

    def cancel(self, job_id: str) -> bool:
        """Cancels a job and returns whether this call did. False: it is final, or its publishing has begun."""


class JobControl(Protocol):
    """What a running phase tells about itself and asks about its job."""

    def report(self, progress: Progress) -> None:
        """Tells how far the phase is. Cheap: reports are thinned out before they are kept."""

    def check(self) -> None:
        """Raises a `JobStoppedError` when the job is to end. Cheap; long work calls it often."""

    def begin_publishing(self) -> None:
        """From here a cancel comes too late; raises `JobCancelledError` when one came before. May be repeated."""


@dataclass(frozen=True)
class QuantizeOutcome:
    """What an engine tells of its work. `calibration_use` is None when the recipe needed no data."""

    versions: dict[str, str]
    num_quantized_modules: int
    format: str = COMPRESSED_TENSORS
    calibration_use: CalibrationUse | None = None
    modules: tuple[ModuleResult, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    peak_memory_bytes: int = 0
    peak_device_memory_bytes: int = 0


@dataclass(frozen=True)
class EvaluateOutcome:
    """The evaluation, and the memory that it took."""

    evaluation: Evaluation
    peak_memory_bytes: int = 0
    peak_device_memory_bytes: int = 0


class Engine(Protocol):
    """A quantization engine. Both operations raise `BitmillError` with the engine's own reason when it refuses,
    `InternalError` ENGINE_CRASHED when it dies, and whatever `control.check` raises, after ending the work.
    """

    name: str

    def require_installed(self) -> None:
        """Raises `FailedPreconditionError` ENGINE_NOT_INSTALLED, which says how to install it."""

    def quantize(
        self,
        source_dir: Path,
        output_dir: Path,
        recipe: Recipe,
        calibration: Calibration,
        calibration_path: Path | None,
        control: JobControl,
    ) -> QuantizeOutcome:
        """Writes a Hugging Face model directory to `output_dir`, which is not there yet."""

    def evaluate(
        self, source_dir: Path, model_dir: Path, num_tokens: int, window: int, control: JobControl
    ) -> EvaluateOutcome:
        """Compares a model with its source on held-out text, cut into windows of `window` tokens."""


class Verifier(Protocol):
    """The serving engine, as a check of what is about to be published."""

    def require_installed(self) -> None:
        """Raises `FailedPreconditionError` ENGINE_NOT_INSTALLED, which says how to install it."""

    def verify(self, model_dir: Path, devices: Sequence[DeviceSupport], control: JobControl) -> Verification:
        """Loads a model directory and generates with it; `skipped` where this host is none of its devices.

        Raises `FailedPreconditionError` VERIFICATION_FAILED with the serving engine's own words when it does not load
        or does not generate, `InternalError` ENGINE_CRASHED when it dies, and whatever `control.check` raises.
        """


class Host(Protocol):
    """The machine that the worker runs on."""

    def free_disk_bytes(self, directory: Path) -> int:
        """Returns the bytes free to this process on the file system that holds `directory`, or will hold it."""

    def memory_bytes(self) -> int:
        """Returns the memory that processes here may use in all, a container's limit included."""

    def has_cuda(self) -> bool:
        """Whether there is an NVIDIA GPU that processes here may use."""

    def device_memory_bytes(self) -> int:
        """Returns the memory of the first such GPU, which engines work on; 0 where there is none."""


class CostHistory(Protocol):
    """What phases of this server's finished jobs took. Calls block; any thread may make them."""

    def record(self, finished: Sequence[FinishedWork]) -> None:
        """Keeps what phases took. A phase of a job that is here already stays as it was."""

    def recent(self, phase: JobPhase, kind: str, limit: int) -> Sequence[FinishedWork]:
        """Returns the last finished work of a phase and a kind, the newest first: at most `limit`."""


@dataclass(frozen=True)
class RunningJob:
    """A job in a worker's hands. `directory` is its own, kept until the job is final, and may be gone after a move."""

    job_id: str
    spec: QuantizationSpec
    directory: Path = field(compare=False)


@dataclass(frozen=True)
class Done(Generic[T]):
    """What a phase returned, and how long the run that succeeded took."""

    result: T
    duration_s: float


class StepRunner(Protocol):
    """Runs one phase at most until it succeeds once: a result that was recorded before is returned without work."""

    def __call__(self, phase: JobPhase, result_type: type[T], work: Callable[[JobControl], T]) -> Done[T]:
        """Runs `work`, records its result under the phase, and returns it. `T` is a dataclass of plain data."""
