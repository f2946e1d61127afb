"""The command line's pure parts: where global options may stand, and how numbers read."""

from __future__ import annotations

import pytest

from bitmill.cli import output
from bitmill.cli.following import counted, stage
from bitmill.cli.session import hoisted
from bitmill.quantizer.v1.quantization_job_pb2 import JobPhase, JobProgress, JobState, QuantizationJob


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["jobs", "list", "--json"], ["--json", "jobs", "list"]),
        (["--json", "jobs", "list"], ["--json", "jobs", "list"]),
        (["generate", "hi", "--inference", "h:1"], ["--inference", "h:1", "generate", "hi"]),
        (["generate", "hi", "--timeout=3"], ["--timeout=3", "generate", "hi"]),
        (["generate", "--", "--json"], ["generate", "--", "--json"]),
        (["jobs", "list", "--timeout"], ["jobs", "list", "--timeout"]),
        ([], []),
    ],
)
def test_global_options_may_stand_anywhere_before_a_double_dash(given: list[str], expected: list[str]) -> None:
    assert hoisted(given) == expected


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (JobProgress(), ""),
        (JobProgress(completed=3, total=30, unit="layers", loss=0.012345), "3/30 layers, loss 0.01235"),
        (JobProgress(completed=0, total=2_000_000, unit="bytes"), "0 bytes/2.0 MB"),
        (JobProgress(completed=1500, unit="bytes"), "1.5 kB"),
        (JobProgress(completed=5, unit="files"), "5 files"),
    ],
)
def test_progress_reads_as_counted(progress: JobProgress, text: str) -> None:
    assert counted(progress) == text


def test_a_job_is_where_its_phase_is_while_it_runs() -> None:
    phase = JobPhase.JOB_PHASE_QUANTIZE
    assert stage(QuantizationJob(state=JobState.JOB_STATE_RUNNING, phase=phase)) == "quantize"
    assert stage(QuantizationJob(state=JobState.JOB_STATE_FAILED, phase=phase)) == "failed"
    assert stage(QuantizationJob(state=JobState.JOB_STATE_RUNNING)) == "running"


def test_a_state_that_this_client_does_not_know_is_its_number() -> None:
    assert output.word(JobState, 77) == "77"
