"""The durable queue of jobs on DBOS: one workflow per job, one recorded step per phase.

A job's state is the state of its workflow, and its id the workflow's id. What a phase returns is recorded as JSON under
`JOB_SCHEMA`; a change that makes older records unreadable needs a new number, and old jobs then wait for an old server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import structlog
from dbos import (
    DBOS,
    DBOSPortableJSONSerializer,
    PortableWorkflowError,
    SetWorkflowID,
    WorkflowStatus,
)
from dbos import error as dbos_error
from pydantic import TypeAdapter

from bitmill_common.errors import BitmillError, FailedPreconditionError
from bitmill_quantizer.jobs.history import build_history
from bitmill_quantizer.jobs.job import (
    History,
    Job,
    JobCancelledError,
    JobError,
    JobInterruptedError,
    JobList,
    JobPhase,
    JobPosition,
    JobState,
)
from bitmill_quantizer.jobs.journal import Claim, Journal, Summary
from bitmill_quantizer.jobs.step_control import StepControl
from bitmill_quantizer.ports import Done, JobControl, RunningJob, StepRunner
from bitmill_quantizer.recipes.specs import QuantizationSpec

JOB_SCHEMA = "job-schema-2"
# Servers that are stopped in an orderly way count too, so a long job must outlive some upgrades.
MAX_RECOVERIES = 10

_APPLICATION = "bitmill-quantizer"
_QUEUE = "quantization-jobs"
_WORKFLOW = "quantization-job"
_QUEUE_POLL_S = 0.25
_STOP_TIMEOUT_S = 15.0
_MAX_LOGGED_IDS = 20

_STATES: dict[str, JobState] = {
    "DELAYED": JobState.QUEUED,
    "ENQUEUED": JobState.QUEUED,
    "PENDING": JobState.RUNNING,
    "SUCCESS": JobState.SUCCEEDED,
    "ERROR": JobState.FAILED,
    "MAX_RECOVERY_ATTEMPTS_EXCEEDED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
}
_CRASHED_REPEATEDLY = JobError(
    "WORKER_CRASHED_REPEATEDLY",
    "the server ended too many times while it worked on this job, which is given up",
)

T = TypeVar("T")
RunJob = Callable[[RunningJob, StepRunner], str]
"""Runs a job through its phases, each by the step runner, and returns the artifact's URI."""

log = structlog.get_logger("bitmill.jobs")
_spec_type = TypeAdapter(QuantizationSpec)


class DbosJobs:
    """The job board, and the worker that takes jobs from it, `concurrency` at a time.

    One in a process, since DBOS is one in a process. `worker_id` must differ between servers that share a database;
    a server takes up what the last one of its id left, and gives a job up after `max_recoveries` of that. `run_job`
    runs in a thread of DBOS's.
    """

    def __init__(
        self,
        database_url: str,
        work_dir: Path,
        run_job: RunJob,
        *,
        worker_id: str = "worker-0",
        concurrency: int = 1,
        max_recoveries: int = MAX_RECOVERIES,
    ) -> None:
        self._work_dir = work_dir
        self._run_job = run_job
        self._concurrency = concurrency
        self._stopping = threading.Event()
        self._active = 0
        self._idle = threading.Condition()
        self._lock = _lock_directory(work_dir)
        self._journal = Journal(database_url)
        _quiet_dbos()
        DBOS(
            config={
                "name": _APPLICATION,
                "system_database_url": database_url,
                "application_version": JOB_SCHEMA,
                "executor_id": worker_id,
                "serializer": DBOSPortableJSONSerializer(),
                "enable_otlp": False,
                "log_level": "WARNING",
            }
        )

        # A closure, since DBOS takes a method for that of a registered class.
        def quantization_job(spec: dict[str, Any]) -> dict[str, str]:
            return self._work(str(DBOS.workflow_id), _spec_type.validate_python(spec))

        self._workflow = DBOS.workflow(name=_WORKFLOW, max_recovery_attempts=max_recoveries)(quantization_job)

    def start(self) -> None:
        """Takes up what was left, then new jobs as they come; removes the directories of jobs that are final.

        Jobs of another `JOB_SCHEMA` are left as they are, and named in the log: they can be cancelled, and wait else.
        """
        left = sorted(self._jobs_dir.iterdir()) if self._jobs_dir.is_dir() else []
        DBOS.launch()
        DBOS.register_queue(
            _QUEUE,
            worker_concurrency=self._concurrency,
            polling_interval_sec=_QUEUE_POLL_S,
            on_conflict="always_update",
        )
        for directory in left:
            job = self.find(directory.name)
            if job is None or job.state.is_final:
                shutil.rmtree(directory, ignore_errors=True)
        unfinished = _list_workflows(status=[name for name, state in _STATES.items() if not state.is_final])
        if waiting := [status.workflow_id for status in unfinished if status.app_version != JOB_SCHEMA]:
            log.warning("jobs_wait_for_another_version", count=len(waiting), job_ids=waiting[:_MAX_LOGGED_IDS])

    def stop(self) -> None:
        """Ends the running phases and takes no more jobs. What ran goes on at the next start."""
        self._stopping.set()
        with self._idle:
            if not self._idle.wait_for(lambda: self._active == 0, _STOP_TIMEOUT_S):
                log.warning("jobs_still_running", count=self._active)
        DBOS.destroy(destroy_registry=True)
        self._journal.close()
        self._lock.close()

    def submit(self, job_id: str, spec: QuantizationSpec) -> Job:
        """Queues a job and returns it; one that has this id already is returned as it is."""
        self._journal.add(job_id)
        with SetWorkflowID(job_id):
            DBOS.enqueue_workflow(_QUEUE, self._workflow, _spec_type.dump_python(spec, mode="json"))
        job = self.find(job_id)
        if job is None:
            raise AssertionError(f"job {job_id} is gone right after it was queued")
        return job

    def find(self, job_id: str) -> Job | None:
        """Returns a job, or None when there is none."""
        status = self._status(job_id)
        return None if status is None else _to_job(status, self._journal.summaries([job_id]).get(job_id))

    def list(self, states: Sequence[JobState], limit: int, after: JobPosition | None) -> JobList:
        """Returns up to `limit` jobs that follow `after`, newest first."""
        # DBOS sorts by its own time alone, on SQLite in whole seconds, so all jobs that share the time at either end of
        # the page are read, and sorted here.
        wanted = [name for name, state in _STATES.items() if state in states] if states else None
        found: dict[str, WorkflowStatus] = {}
        before_ms = None
        if after is not None:
            before_ms = after.key[0] - 1
            found |= self._created_at(after.key[0], wanted)
        page = _list_workflows(status=wanted, end_time=_iso(before_ms), limit=limit + 1)
        found |= {status.workflow_id: status for status in page}
        if len(page) > limit:
            found |= self._created_at(_created_ms(page[-1]), wanted)
        summaries = self._journal.summaries(list(found))
        keyed = sorted(((_sort_key(s, summaries), s) for s in found.values()), key=lambda pair: pair[0], reverse=True)
        following = [(key, status) for key, status in keyed if after is None or key < after.key]
        taken = following[:limit]
        return JobList(
            tuple(_to_job(status, summaries.get(status.workflow_id)) for _, status in taken),
            JobPosition(taken[-1][0]) if len(following) > limit else None,
        )

    def history(self, job_id: str, after_sequence: int) -> History | None:
        """Returns the events after `after_sequence`, or None when there is no such job."""
        # The state first, as `build_history` wants it.
        status = self._status(job_id)
        if status is None:
            return None
        entries = self._journal.entries(job_id)
        job = _to_job(status, self._journal.summaries([job_id]).get(job_id))
        return build_history(job, entries, after_sequence)

    def cancel(self, job_id: str) -> bool:
        """Cancels a job and returns whether this call did."""
        job = self.find(job_id)
        if job is None or job.state.is_final or not self._journal.claim(job_id, Claim.CANCEL):
            return False
        DBOS.cancel_workflow(job_id)
        return True

    @property
    def _jobs_dir(self) -> Path:
        return self._work_dir / "jobs"

    def _status(self, job_id: str) -> WorkflowStatus | None:
        statuses = _list_workflows(workflow_ids=[job_id])
        return statuses[0] if statuses else None

    def _created_at(self, time_ms: int, wanted: Sequence[str] | None) -> dict[str, WorkflowStatus]:
        statuses = _list_workflows(status=wanted, start_time=_iso(time_ms), end_time=_iso(time_ms))
        return {status.workflow_id: status for status in statuses}

    def _work(self, job_id: str, spec: QuantizationSpec) -> dict[str, str]:
        job = RunningJob(job_id, spec, self._jobs_dir / job_id)

        def step(phase: JobPhase, result_type: type[T], work: Callable[[JobControl], T]) -> Done[T]:
            done: TypeAdapter[Done[T]] = TypeAdapter(Done[result_type])  # type: ignore[valid-type]
            recorded = DBOS.run_step(
                {"name": phase.value},
                lambda: done.dump_python(self._run_phase(job_id, phase, work), mode="json"),
            )
            return done.validate_python(recorded)

        with self._counted(), structlog.contextvars.bound_contextvars(job_id=job_id):
            try:
                uri = self._run_job(job, step)
            except JobInterruptedError:
                log.info("job_interrupted")
                raise
            except PortableWorkflowError as error:
                log.warning("job_failed", reason=error.code, message=error.message)
                _remove(job.directory)
                raise
            except Exception:
                log.exception("job_failed", reason="INTERNAL")
                _remove(job.directory)
                raise
            except BaseException:
                _remove(job.directory)
                raise
            _remove(job.directory)
            log.info("job_succeeded", artifact_uri=uri)
            return {"artifact_uri": uri}

    def _run_phase(self, job_id: str, phase: JobPhase, work: Callable[[JobControl], T]) -> Done[T]:
        start = time.monotonic()
        control = StepControl(job_id, phase, self._journal, self._stopping)
        try:
            control.begin()
            result = work(control)
            control.end()
        except JobCancelledError as cancelled:
            # The claim may have outlived a server that died before it could tell DBOS.
            DBOS.cancel_workflow(job_id)
            raise dbos_error.DBOSWorkflowCancelledError(f"job {job_id} is cancelled") from cancelled
        except Exception as error:
            raise _to_portable(error, phase) from error
        return Done(result, time.monotonic() - start)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._idle:
            self._active += 1
        try:
            yield
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()


def _to_portable(error: Exception, phase: JobPhase) -> PortableWorkflowError:
    """Returns what is recorded of a failure: reason, text and metadata, all of which a job shows."""
    match error:
        case BitmillError():
            reason, message, metadata = error.reason, error.message, error.metadata
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            reason, message, metadata = "NO_SPACE", "no space left on the worker's disk", {}
        case _:
            log.error("phase_crashed", phase=phase.value, exc_info=error)
            reason, message, metadata = "INTERNAL", "internal error; the server's log has it by the job's id", {}
    return PortableWorkflowError(message, type(error).__name__, reason, {**metadata, "phase": phase.value})


def _to_job(status: WorkflowStatus, summary: Summary | None) -> Job:
    inputs: Any = status.input
    state = _STATES[status.status]
    last = summary.last if summary else None
    create_time = summary.create_time if summary else _time(_created_ms(status))
    start_time = summary.start_time if summary else None
    if start_time is None and state is JobState.RUNNING and status.dequeued_at:
        start_time = max(create_time, _time(status.dequeued_at))
    end_time = None
    if state.is_final and status.completed_at:
        # DBOS on SQLite cuts to whole seconds, which would put the end before what came last.
        end_time = max(_time(status.completed_at), last.time if last else create_time)
    return Job(
        job_id=status.workflow_id,
        spec=_spec_type.validate_python(inputs["args"][0]),
        state=state,
        create_time=create_time,
        phase=last.phase if last else None,
        progress=last.progress if last else None,
        error=_error_of(status) if state is JobState.FAILED else None,
        artifact_uri=status.output["artifact_uri"] if state is JobState.SUCCEEDED and status.output else "",
        start_time=start_time,
        end_time=end_time,
    )


def _sort_key(status: WorkflowStatus, summaries: Mapping[str, Summary]) -> tuple[int, int, str]:
    created_ms = _created_ms(status)
    summary = summaries.get(status.workflow_id)
    own_ms = round(summary.create_time.timestamp() * 1000) if summary else created_ms
    return (created_ms, own_ms, status.workflow_id)


def _error_of(status: WorkflowStatus) -> JobError:
    match status.error:
        case None:
            return _CRASHED_REPEATEDLY
        case PortableWorkflowError(message=message, code=str(reason), data=dict(data)):
            return JobError(reason, message, {key: str(value) for key, value in data.items()})
        case error:
            return JobError(
                "INTERNAL", "internal error; the server's log has it by the job's id", {"error": str(error)}
            )


def _list_workflows(**query: Any) -> list[WorkflowStatus]:
    return DBOS.list_workflows(name=_WORKFLOW, sort_desc=True, **query)


def _created_ms(status: WorkflowStatus) -> int:
    return status.created_at or 0


def _time(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _iso(time_ms: int | None) -> str | None:
    # DBOS cuts to whole milliseconds by way of a float, which half a millisecond more keeps from rounding down.
    return None if time_ms is None else (_time(time_ms) + timedelta(microseconds=500)).isoformat()


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _lock_directory(work_dir: Path) -> IO[bytes]:
    """Keeps a second server out of a work directory: it would take the first one's running jobs for abandoned."""
    work_dir.mkdir(parents=True, exist_ok=True)
    lock = (work_dir / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise FailedPreconditionError(
            "WORK_DIR_IN_USE", f"another server works in {work_dir}", {"work_dir": os.fspath(work_dir)}
        ) from None
    return lock


class _JobEndsFilter(logging.Filter):
    """Drops what DBOS says of jobs that fail or are cancelled: that is said once, as job_failed and job_cancelled."""

    _starts = ("Exception encountered in background workflow", "Workflow job-")

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._starts)


def _quiet_dbos() -> None:
    logger = logging.getLogger("dbos")
    if not logger.handlers:
        # DBOS adds a handler of its own where there is none; its records go with all others instead.
        logger.addHandler(logging.NullHandler())
        logger.addFilter(_JobEndsFilter())
