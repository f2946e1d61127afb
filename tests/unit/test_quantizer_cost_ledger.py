"""What phases took is kept across restarts, for each worker by itself."""

from __future__ import annotations

from pathlib import Path

from bitmill_quantizer.jobs.cost_ledger import CostLedger
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.plans.durations import FinishedWork, PhaseWork

GPTQ = PhaseWork(JobPhase.QUANTIZE, "GPTQ by llmcompressor on cpu", 10, 20)
SAVE = PhaseWork(JobPhase.SAVE, "", num_bytes=30)


def test_the_last_of_a_kind_come_back_after_a_restart_newest_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.sqlite"
    first = CostLedger(url, "worker-0")
    for number in range(3):
        job_id = f"job-{number}"
        first.record([FinishedWork(job_id, GPTQ, number + 0.5), FinishedWork(job_id, SAVE, 1.0)])
    first.close()
    second = CostLedger(url, "worker-0")
    found = second.recent(JobPhase.QUANTIZE, GPTQ.kind, 5)
    assert {each.job_id: each.duration_s for each in found} == {"job-0": 0.5, "job-1": 1.5, "job-2": 2.5}
    assert all(each.work == GPTQ for each in found)
    assert len(second.recent(JobPhase.QUANTIZE, GPTQ.kind, 2)) == 2
    assert second.recent(JobPhase.QUANTIZE, "RTN by llmcompressor on cpu", 5) == []
    assert [each.work for each in second.recent(JobPhase.SAVE, "", 5)] == [SAVE] * 3
    second.close()


def test_a_job_counts_once_and_for_its_worker_only(tmp_path: Path) -> None:
    """A job that is replayed after its end is recorded again, and another worker's machine may be another."""
    url = f"sqlite:///{tmp_path}/jobs.sqlite"
    one, other = CostLedger(url, "worker-0"), CostLedger(url, "worker-1")
    one.record([FinishedWork("job-0", GPTQ, 1.0)])
    one.record([FinishedWork("job-0", GPTQ, 9.0)])
    assert [each.duration_s for each in one.recent(JobPhase.QUANTIZE, GPTQ.kind, 5)] == [1.0]
    assert other.recent(JobPhase.QUANTIZE, GPTQ.kind, 5) == []
    one.close()
    other.close()
