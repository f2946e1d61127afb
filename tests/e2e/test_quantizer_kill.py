"""The quantizer server killed with SIGKILL at every phase, and started again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from bitmill.artifact.v1 import artifact_service_pb2, artifact_service_pb2_grpc
from bitmill.quantizer.v1 import quantizer_service_pb2, quantizer_service_pb2_grpc
from bitmill.quantizer.v1.quantization_job_pb2 import (
    JOB_PHASE_QUANTIZE,
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
    JobEvent,
    QuantizationJob,
    QuantizationSpec,
)
from support import fake_quantization_engine as fake_engine
from support.held_quantizer import FUNCTIONS
from support.quantizer_process import QuantizerProcess, quantizer_process
from support.quantizing import Place

DEADLINE_S = 60


class Calls:
    """The calls of these tests, blocking."""

    def __init__(self, server: QuantizerProcess) -> None:
        self.channel = grpc.insecure_channel(server.address)
        self.jobs = quantizer_service_pb2_grpc.QuantizerServiceStub(self.channel)
        self.artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(self.channel)

    def create(self, spec: QuantizationSpec) -> QuantizationJob:
        request = quantizer_service_pb2.CreateQuantizationJobRequest(spec=spec)
        return self.jobs.CreateQuantizationJob(request, timeout=DEADLINE_S).job

    def watch(self, job_id: str) -> Iterator[JobEvent]:
        request = quantizer_service_pb2.WatchQuantizationJobRequest(job_id=job_id)
        for response in self.jobs.WatchQuantizationJob(request, timeout=DEADLINE_S):
            yield response.event

    def finished(self, job_id: str) -> QuantizationJob:
        return list(self.watch(job_id))[-1].job

    def is_intact(self, uri: str) -> bool:
        request = artifact_service_pb2.VerifyArtifactRequest(uri=uri)
        return self.artifacts.VerifyArtifact(request, timeout=DEADLINE_S).intact


@pytest.fixture
def place(tmp_path: Path) -> Place:
    os.mkfifo(tmp_path / "held")
    return Place(tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("phase", FUNCTIONS)
def test_a_job_survives_the_server_killed_in(place: Place, phase: str, when: str) -> None:
    """After a restart the job succeeds, the queue goes on, the artifacts are intact, and nothing is left over."""
    with quantizer_process(place, phase, when, str(place.root / "held")) as server:
        calls = Calls(server)
        job = calls.create(place.spec())
        waiting = calls.create(place.spec("next", group_size=64))
        (place.root / "held").open().close()
        server.kill()
    with quantizer_process(place) as server:
        calls = Calls(server)
        done, next_done = calls.finished(job.job_id), calls.finished(waiting.job_id)
        assert (done.state, next_done.state) == (JOB_STATE_SUCCEEDED, JOB_STATE_SUCCEEDED)
        assert calls.is_intact(done.artifact_uri)
        assert calls.is_intact(next_done.artifact_uri)
        assert place.leftovers() == []


def test_an_engine_dies_with_a_killed_server_and_the_job_starts_it_again(place: Place) -> None:
    """The second run writes where the first one never did."""
    fake_engine.behave(place.engine, quantize="wait")
    with quantizer_process(place) as server:
        calls = Calls(server)
        job = calls.create(place.spec())
        reached = (e for e in calls.watch(job.job_id) if e.job.phase == JOB_PHASE_QUANTIZE and e.job.progress.completed)
        assert next(reached).job.state == JOB_STATE_RUNNING
        server.kill()
    assert fake_engine.pids(place.engine)
    assert fake_engine.all_end(place.engine)
    fake_engine.behave(place.engine)
    with quantizer_process(place) as server:
        done = Calls(server).finished(job.job_id)
        assert done.state == JOB_STATE_SUCCEEDED
        assert place.leftovers() == []


def test_a_cancel_before_the_kill_holds_after_it(place: Place) -> None:
    """Nothing is published, and what the job left on the disk is gone."""
    with quantizer_process(place, "UPLOAD", "after", str(place.root / "held")) as server:
        calls = Calls(server)
        job = calls.create(place.spec())
        (place.root / "held").open().close()
        request = quantizer_service_pb2.CancelQuantizationJobRequest(job_id=job.job_id)
        calls.jobs.CancelQuantizationJob(request, timeout=DEADLINE_S)
        server.kill()
    assert place.leftovers() == [job.job_id]
    with quantizer_process(place) as server:
        calls = Calls(server)
        assert calls.finished(job.job_id).state == JOB_STATE_CANCELLED
        listed = calls.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest(), timeout=DEADLINE_S)
        assert list(listed.artifacts) == []
        assert place.leftovers() == []


def test_a_cancel_comes_too_late_once_publishing_began(place: Place) -> None:
    """State and artifact agree: the job is published after the restart, and was never CANCELLED."""
    with quantizer_process(place, "PUBLISH", "after", str(place.root / "held")) as server:
        calls = Calls(server)
        job = calls.create(place.spec())
        (place.root / "held").open().close()
        request = quantizer_service_pb2.CancelQuantizationJobRequest(job_id=job.job_id)
        assert calls.jobs.CancelQuantizationJob(request, timeout=DEADLINE_S).job.state == JOB_STATE_RUNNING
        server.kill()
    with quantizer_process(place) as server:
        done = Calls(server).finished(job.job_id)
        assert done.state == JOB_STATE_SUCCEEDED
        assert Calls(server).is_intact(done.artifact_uri)


def test_a_job_whose_files_are_lost_fails_with_the_reason(place: Place) -> None:
    """A phase that was recorded is not run again, so what it left must be there."""
    with quantizer_process(place, "EVALUATE", "before", str(place.root / "held")) as server:
        job = Calls(server).create(place.spec())
        (place.root / "held").open().close()
        server.kill()
    for model in (place.work / "jobs" / job.job_id).glob("model-*"):
        model.rename(place.root / "lost")
    with quantizer_process(place) as server:
        failed = Calls(server).finished(job.job_id)
        assert (failed.state, failed.error.reason) == (JOB_STATE_FAILED, "WORK_LOST")


def test_a_second_server_in_the_same_work_directory_refuses_to_start(place: Place) -> None:
    """It would take the first one's running jobs for abandoned ones."""
    with quantizer_process(place) as first:
        with pytest.raises(AssertionError, match="another server works in"), quantizer_process(place):
            pass
        assert Calls(first).finished(Calls(first).create(place.spec()).job_id).state == JOB_STATE_SUCCEEDED


def test_the_server_stays_small_and_imports_no_torch(place: Place) -> None:
    """Below 300 MB after a job."""
    with quantizer_process(place) as server:
        calls = Calls(server)
        assert calls.finished(calls.create(place.spec()).job_id).state == JOB_STATE_SUCCEEDED
        process = psutil.Process(server.process.pid)
        assert process.memory_info().rss < 300e6
        assert not any("torch" in mapped.path for mapped in process.memory_maps())
        assert server.stop() == 0
