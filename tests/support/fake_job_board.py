"""A job board in memory, whose jobs move when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from bitmill_quantizer.jobs.job import History, Job, JobEvent, JobList, JobPosition, JobState
from bitmill_quantizer.recipes.specs import QuantizationSpec


class FakeJobBoard:
    """A `JobBoard`. `set_state` does what a worker would."""

    def __init__(self) -> None:
        self._histories: dict[str, list[JobEvent]] = {}

    def submit(self, job_id: str, spec: QuantizationSpec) -> Job:
        if job_id not in self._histories:
            job = Job(job_id, spec, JobState.QUEUED, datetime.now(UTC))
            self._histories[job_id] = [JobEvent(1, job.create_time, job)]
        return self._histories[job_id][-1].job

    def find(self, job_id: str) -> Job | None:
        return self._histories[job_id][-1].job if job_id in self._histories else None

    def list(self, states: Sequence[JobState], limit: int, after: JobPosition | None) -> JobList:
        keyed = sorted(
            ((index, 0, job_id), history[-1].job) for index, (job_id, history) in enumerate(self._histories.items())
        )
        wanted = [
            (key, job)
            for key, job in reversed(keyed)
            if (not states or job.state in states) and (after is None or key < after.key)
        ]
        taken = wanted[:limit]
        return JobList(tuple(job for _, job in taken), JobPosition(taken[-1][0]) if len(wanted) > limit else None)

    def history(self, job_id: str, after_sequence: int) -> History | None:
        if job_id not in self._histories:
            return None
        events = self._histories[job_id]
        return History(tuple(events[after_sequence:]), events[-1].job.state.is_final)

    def cancel(self, job_id: str) -> bool:
        if self._histories[job_id][-1].job.state.is_final:
            return False
        self.set_state(job_id, JobState.CANCELLED)
        return True

    def set_state(self, job_id: str, state: JobState, **changes: object) -> None:
        """Adds an event in which the job has this state."""
        events = self._histories[job_id]
        job = replace(events[-1].job, state=state, **changes)
        events.append(JobEvent(len(events) + 1, datetime.now(UTC), job))
