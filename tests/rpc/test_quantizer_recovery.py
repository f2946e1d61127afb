"""A job whose servers keep ending under it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import structlog

from bitmill.quantizer.v1 import quantizer_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import (
    JOB_PHASE_QUANTIZE,
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
)
from bitmill_quantizer.jobs import dbos_jobs
from bitmill_quantizer.jobs.dbos_jobs import DbosJobs
from bitmill_quantizer.jobs.job import JobInterruptedError
from bitmill_quantizer.ports import RunningJob, StepRunner
from support import fake_quantization_engine as fake_engine
from support.quantizing import DEADLINE_S, Place, running, serving


async def test_a_job_is_given_up_after_too_many_ends_and_the_queue_goes_on(tmp_path: Path) -> None:
    """It is FAILED with a reason, its watchers hear of it, and the next job runs."""
    place = Place(tmp_path)
    taken = threading.Event()

    def run_job(job: RunningJob, step: StepRunner) -> str:
        if job.spec.artifact_name == "good":
            return "file:///done"
        taken.set()
        raise JobInterruptedError

    def start() -> DbosJobs:
        url = f"sqlite:///{place.work}/jobs.sqlite"
        jobs = DbosJobs(url, place.work, run_job, max_recoveries=1)
        jobs.start()
        return jobs

    job_id = ""
    for _ in range(2):
        jobs = await asyncio.to_thread(start)
        async with serving(place, jobs, place.workshop()) as quantizer:
            job_id = job_id or (await quantizer.create(place.spec("bad"))).job_id
            assert await asyncio.to_thread(taken.wait, DEADLINE_S)
            taken.clear()
        await asyncio.to_thread(jobs.stop)
    jobs = await asyncio.to_thread(start)
    async with serving(place, jobs, place.workshop()) as quantizer:
        failed = await quantizer.finished(job_id)
        assert (failed.state, failed.error.reason) == (JOB_STATE_FAILED, "WORKER_CRASHED_REPEATEDLY")
        done = await quantizer.finished((await quantizer.create(place.spec("good"))).job_id)
        assert (done.state, done.artifact_uri) == (JOB_STATE_SUCCEEDED, "file:///done")
    await asyncio.to_thread(jobs.stop)


async def test_jobs_of_an_older_server_wait_and_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold up no new one, and can be seen and cancelled."""
    place = Place(tmp_path)
    fake_engine.behave(place.engine, quantize="hang")
    monkeypatch.setattr(dbos_jobs, "JOB_SCHEMA", "job-schema-0")
    async with running(place) as quantizer:
        old = [(await quantizer.create(place.spec(name), name)).job_id for name in ("running", "queued")]
        await quantizer.reaches(old[0], JOB_PHASE_QUANTIZE, 1)
    monkeypatch.undo()
    fake_engine.behave(place.engine)
    with structlog.testing.capture_logs() as logs:
        async with running(place) as quantizer:
            done = await quantizer.finished((await quantizer.create(place.spec("new"))).job_id)
            assert done.state == JOB_STATE_SUCCEEDED
            listed = await quantizer.jobs.ListQuantizationJobs(quantizer_service_pb2.ListQuantizationJobsRequest())
            states = {job.job_id: job.state for job in listed.jobs}
            assert [states[job_id] for job_id in old] == [JOB_STATE_RUNNING, JOB_STATE_QUEUED]
            for job_id in old:
                assert (await quantizer.cancel(job_id)).state == JOB_STATE_CANCELLED
    [warning] = [entry for entry in logs if entry["event"] == "jobs_wait_for_another_version"]
    assert (warning["count"], set(warning["job_ids"])) == (2, set(old))
