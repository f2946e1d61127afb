"""A job's history, made of its journal and its state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitmill_quantizer.jobs.job import History, Job, JobEvent, JobState
from bitmill_quantizer.jobs.journal import Entry


def build_history(job: Job, entries: Sequence[Entry], after_sequence: int) -> History:
    """Returns the events of a job after `after_sequence`.

    The first event is its creation, then each entry is one, and the last is its final state once it has one. `entries`
    must be all of the job's, and read after its state: a job in a final state gets no more of them, so every event
    keeps its sequence number for ever.
    """
    queued = replace(
        job,
        state=JobState.QUEUED,
        phase=None,
        progress=None,
        error=None,
        artifact_uri="",
        start_time=None,
        end_time=None,
    )
    running = replace(queued, state=JobState.RUNNING, start_time=entries[0].time if entries else None)
    events = [JobEvent(1, job.create_time, queued)]
    events += [
        JobEvent(entry.sequence + 1, entry.time, replace(running, phase=entry.phase, progress=entry.progress))
        for entry in entries
    ]
    if job.state.is_final:
        events.append(JobEvent(len(events) + 1, job.end_time or job.create_time, job))
    return History(tuple(event for event in events if event.sequence > after_sequence), job.state.is_final)
