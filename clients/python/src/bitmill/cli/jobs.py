"""`bitmill jobs`: list, show, watch and cancel quantization jobs."""

from __future__ import annotations

import enum
from itertools import islice
from typing import Annotated

import typer

from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.cli import output
from bitmill.cli.artifact_facts import recipe_text, show_result
from bitmill.cli.following import counted, follow, view_for
from bitmill.cli.session import session_of
from bitmill.quantizer.v1.quantization_job_pb2 import JobPhase, JobState, QuantizationJob
from bitmill.watching import succeeded

app = typer.Typer(help="Quantization jobs.", no_args_is_help=True)

_STATES = [name.removeprefix("JOB_STATE_") for name, number in JobState.items() if number]
StateName = enum.Enum("StateName", {name: name for name in _STATES}, type=str)  # type: ignore[misc]
JobId = Annotated[str, typer.Argument(metavar="JOB_ID")]


@app.command("list")
def list_jobs(
    context: typer.Context,
    state: Annotated[
        list[StateName] | None, typer.Option(case_sensitive=False, help="Only jobs in this state. May be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=2**31, help="At most this many.")] = None,
) -> None:
    """List jobs, newest first."""
    session = session_of(context)
    with session.quantizer() as client:
        jobs = islice(client.jobs([name.value for name in state or ()]), limit)
        if session.json:
            for job in jobs:
                output.emit(job)
        else:
            output.table(("JOB", "STATE", "PHASE", "SCHEME", "NAME", "CREATED"), map(_row, jobs))


@app.command()
def show(context: typer.Context, job_id: JobId) -> None:
    """Show one job."""
    session = session_of(context)
    with session.quantizer() as client:
        job = client.job(job_id)
        output.emit(job) if session.json else output.facts(_facts(job))


@app.command()
def watch(
    context: typer.Context,
    job_id: JobId,
    after_sequence: Annotated[int, typer.Option(min=0, help="Only events after this one.")] = 0,
) -> None:
    """Follow a job to its end; exit code 1 when it does not succeed. Ctrl-C leaves it running."""
    session = session_of(context)
    with session.quantizer() as client:
        events = client.watch(job_id, after_sequence=after_sequence)
        job = follow(job_id, events, view_for(json=session.json))
        succeeded(job)
        if not session.json:
            show_result(job, client.artifact(job.artifact_uri))


@app.command()
def cancel(context: typer.Context, job_id: JobId) -> None:
    """Ask a job to stop."""
    session = session_of(context)
    with session.quantizer() as client:
        job = client.cancel(job_id)
        output.emit(job) if session.json else output.facts(_facts(job))


def _row(job: QuantizationJob) -> tuple[str, ...]:
    return (
        job.job_id,
        output.word(JobState, job.state),
        output.word(JobPhase, job.phase),
        recipe_text(Artifact(recipe=job.spec.recipe)),
        job.spec.artifact_name,
        output.time(job.create_time),
    )


def _facts(job: QuantizationJob) -> list[tuple[str, str]]:
    return [
        ("job", job.job_id),
        ("state", output.word(JobState, job.state)),
        ("phase", " ".join(part for part in (output.word(JobPhase, job.phase), counted(job.progress)) if part)),
        ("error", f"{job.error.reason}: {job.error.message}" if job.error.reason else ""),
        *((f"  {key}", value) for key, value in sorted(job.error.metadata.items())),
        ("name", job.spec.artifact_name),
        ("source", job.spec.source_uri),
        ("scheme", recipe_text(Artifact(recipe=job.spec.recipe))),
        ("artifact", job.artifact_uri),
        ("created", output.time(job.create_time)),
        ("started", output.time(job.start_time)),
        ("ended", output.time(job.end_time)),
    ]
