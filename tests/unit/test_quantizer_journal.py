"""Each job's entries, and the one claim on its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitmill_quantizer.jobs.job import JobCancelledError, JobInterruptedError, JobPhase, Progress
from bitmill_quantizer.jobs.journal import Claim, Journal
from bitmill_quantizer.jobs.step_control import StepControl


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(f"sqlite:///{tmp_path}/jobs.sqlite")
    journal.add("job-1")
    yield journal
    journal.close()


def test_entries_come_back_in_order_and_after_a_position(journal: Journal) -> None:
    journal.append("job-1", JobPhase.FETCH, Progress())
    journal.append("job-1", JobPhase.QUANTIZE, Progress(3, 30, "layers", 0.25))
    journal.append("job-2", JobPhase.FETCH, Progress())
    [first, second] = journal.entries("job-1")
    assert (first.sequence, first.phase, second.sequence) == (1, JobPhase.FETCH, 2)
    assert second.progress == Progress(3, 30, "layers", 0.25)
    assert journal.entries("job-1", 1) == [second]
    summary = journal.summaries(["job-1", "job-2"])["job-1"]
    assert (summary.start_time, summary.last) == (first.time, second)
    assert summary.create_time <= first.time


def test_a_job_without_entries_has_a_creation_time_that_stays(journal: Journal) -> None:
    before = journal.summaries(["job-1"])
    journal.add("job-1")
    assert journal.summaries(["job-1"]) == before
    assert before["job-1"].last is None


def test_the_first_claim_wins_and_stays(journal: Journal) -> None:
    """For the one who made it too: a publisher that died and comes back goes on."""
    assert journal.held_claim("job-1") is None
    assert journal.claim("job-1", Claim.PUBLISH)
    assert not journal.claim("job-1", Claim.CANCEL)
    assert journal.claim("job-1", Claim.PUBLISH)


def test_of_many_claims_at_once_one_wins(journal: Journal) -> None:
    barrier = threading.Barrier(8)
    won: list[Claim] = []

    def race(claim: Claim) -> None:
        barrier.wait()
        if journal.claim("job-1", claim):
            won.append(claim)

    threads = [threading.Thread(target=race, args=(claim,)) for claim in [*Claim] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 4
    assert set(won) == {journal.held_claim("job-1")}


def test_a_cancelled_job_gets_no_more_entries(journal: Journal) -> None:
    """Its final event keeps its place in the history."""
    journal.append("job-1", JobPhase.FETCH, Progress())
    journal.claim("job-1", Claim.CANCEL)
    journal.append("job-1", JobPhase.FETCH, Progress(1, 2, "bytes"))
    assert len(journal.entries("job-1")) == 1


def test_a_thousand_reports_at_once_make_few_entries_and_lose_not_the_last(journal: Journal) -> None:
    control = StepControl("job-1", JobPhase.UPLOAD, journal, threading.Event())
    control.begin()
    for count in range(1000):
        control.report(Progress(count, 999, "bytes"))
    control.end()
    entries = journal.entries("job-1")
    assert entries[0].progress == Progress()
    assert entries[-1].progress == Progress(999, 999, "bytes")


def test_a_phase_ends_when_its_job_is_cancelled_or_the_server_stops(journal: Journal) -> None:
    stopping = threading.Event()
    control = StepControl("job-1", JobPhase.FETCH, journal, stopping)
    control.check()
    stopping.set()
    with pytest.raises(JobInterruptedError):
        control.check()
    journal.claim("job-1", Claim.CANCEL)
    with pytest.raises(JobCancelledError):
        StepControl("job-1", JobPhase.FETCH, journal, threading.Event()).begin()
    with pytest.raises(JobCancelledError):
        StepControl("job-1", JobPhase.PUBLISH, journal, threading.Event()).begin_publishing()
