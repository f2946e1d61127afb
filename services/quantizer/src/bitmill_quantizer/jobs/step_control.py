"""What a running phase tells its job and hears from it."""

from __future__ import annotations

import threading
import time

import structlog

from bitmill_quantizer.jobs.job import JobCancelledError, JobInterruptedError, JobPhase, Progress
from bitmill_quantizer.jobs.journal import Claim, Journal

# A history is kept forever: an entry every half second at first, later one per percent of the time that the phase
# has taken, and every five seconds in the end.
_MIN_INTERVAL_S = 0.5
_MAX_INTERVAL_S = 5.0
_CLAIM_INTERVAL_S = 0.5

log = structlog.get_logger("bitmill.jobs")


class StepControl:
    """One run of one phase. Used by one thread."""

    def __init__(self, job_id: str, phase: JobPhase, journal: Journal, stopping: threading.Event) -> None:
        self._job_id = job_id
        self._phase = phase
        self._journal = journal
        self._stopping = stopping
        self._start = time.monotonic()
        self._last_entry = 0.0
        self._last_claim_look = 0.0
        self._pending: Progress | None = None

    def begin(self) -> None:
        """Says that the phase begins, unless the job is to end."""
        self._look()
        log.info("phase_started", phase=self._phase.value)
        self._append(Progress())

    def end(self) -> None:
        """Says that the phase has done its work."""
        if self._pending is not None:
            self._append(self._pending)
        log.info("phase_finished", phase=self._phase.value, duration_s=round(time.monotonic() - self._start, 3))

    def report(self, progress: Progress) -> None:
        """Keeps the progress once the last kept one is old enough; the newest is never lost, only late."""
        self._pending = progress
        self._flush_if_due()

    def check(self) -> None:
        """Raises a `JobStoppedError` when the job is to end; looks at most twice a second."""
        self._flush_if_due()
        if self._stopping.is_set() or time.monotonic() - self._last_claim_look >= _CLAIM_INTERVAL_S:
            self._look()

    def begin_publishing(self) -> None:
        """From here a cancel comes too late; `JobCancelledError` when one came before."""
        if not self._journal.claim(self._job_id, Claim.PUBLISH):
            raise JobCancelledError(self._job_id)

    def _look(self) -> None:
        if self._stopping.is_set():
            raise JobInterruptedError(self._job_id)
        self._last_claim_look = time.monotonic()
        if self._journal.held_claim(self._job_id) is Claim.CANCEL:
            raise JobCancelledError(self._job_id)

    def _flush_if_due(self) -> None:
        now = time.monotonic()
        interval = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, (now - self._start) / 100))
        if self._pending is not None and now - self._last_entry >= interval:
            self._append(self._pending)

    def _append(self, progress: Progress) -> None:
        self._pending = None
        self._last_entry = time.monotonic()
        self._journal.append(self._job_id, self._phase, progress)
