"""A job whose servers keep ending under it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from bitmill.quantizer.v1.quantization_job_pb2 import JOB_STATE_FAILED, JOB_STATE_SUCCEEDED
from bitmill_quantizer.jobs.dbos_jobs import DbosJobs
from bitmill_quantizer.jobs.job import JobInterruptedError
from bitmill_quantizer.ports import RunningJob, StepRunner
from support.quantizing import DEADLINE_S, Place, serving


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
