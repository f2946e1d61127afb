"""Following a job: a progress bar on a terminal, plain lines elsewhere, JSON lines when asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol, Self

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from bitmill.cli import output
from bitmill.cli.session import INTERRUPTED
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent, JobPhase, JobProgress, JobState, QuantizationJob


class View(Protocol):
    """Shows the events of a job as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: JobEvent) -> None:
        """Shows one event."""


class JsonView:
    """One JSON object a line on standard output."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: JobEvent) -> None:
        """Prints the event."""
        output.emit(event)


class LineView:
    """A line on standard error at each new state and phase and at each further tenth of a phase."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: JobEvent) -> None:
        """Prints a line unless it would say the same as the last one."""
        progress = event.job.progress
        tenth = 10 * progress.completed // progress.total if progress.total else 0
        step = (stage(event.job), tenth)
        if step != self._last:
            self._last = step
            running = event.job.state == JobState.JOB_STATE_RUNNING
            output.note(" ".join(part for part in (stage(event.job), counted(progress) if running else "") if part))


class BarView:
    """A progress bar for each phase on a terminal's standard error."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=output.console(stderr=True),
        )
        self._stage = ""
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, event: JobEvent) -> None:
        """Moves the bar of the job's phase, a new one when the phase is new."""
        job = event.job
        if stage(job) != self._stage:
            self._finish()
            self._stage = stage(job)
            if job.state in (JobState.JOB_STATE_QUEUED, JobState.JOB_STATE_RUNNING):
                self._task = self._bars.add_task(self._stage, total=None, counted="")
        if self._task is not None:
            self._bars.update(
                self._task,
                completed=job.progress.completed,
                total=job.progress.total or None,
                counted=counted(job.progress),
            )

    def _finish(self) -> None:
        if self._task is not None:
            total = self._bars.tasks[self._task].total or 1
            self._bars.update(self._task, completed=total, total=total)
            self._bars.stop_task(self._task)
            self._task = None


def view_for(*, json: bool) -> View:
    """Returns the view that fits: JSON when asked for, a bar on a terminal, else lines."""
    if json:
        return JsonView()
    return BarView() if sys.stderr.isatty() else LineView()


def follow(job_id: str, events: Iterable[JobEvent], view: View) -> QuantizationJob:
    """Shows a job's events up to the last and returns the job then. Ctrl-C leaves the job running and says so."""
    job = QuantizationJob()
    try:
        with view:
            for event in events:
                job = event.job
                view.show(event)
    except KeyboardInterrupt:
        output.note(
            f"job {job_id} goes on\n  follow it: bitmill jobs watch {job_id}\n  stop it:   bitmill jobs cancel {job_id}"
        )
        raise typer.Exit(INTERRUPTED) from None
    return job


def stage(job: QuantizationJob) -> str:
    """Returns the phase of a running job, else its state."""
    running = job.state == JobState.JOB_STATE_RUNNING and job.phase
    return output.word(JobPhase, job.phase) if running else output.word(JobState, job.state)


def counted(progress: JobProgress) -> str:
    """Returns how far a phase is, for example "3/30 layers, loss 0.0123"; empty when nothing is counted yet."""
    if not progress.completed and not progress.total:
        return ""
    if progress.unit == "bytes":
        numbers = [output.size(progress.completed) or "0 bytes", output.size(progress.total)]
        text = "/".join(number for number in numbers if number)
    else:
        total = f"/{progress.total}" if progress.total else ""
        text = f"{progress.completed}{total} {progress.unit}"
    return f"{text}, loss {progress.loss:.4g}" if progress.HasField("loss") else text
