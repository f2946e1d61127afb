"""Jobs on the real queue (DBOS on SQLite), over a socket, with a child process in the engine's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.artifact.v1 import artifact_service_pb2
from bitmill.quantizer.v1 import quantizer_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import (
    JOB_PHASE_EVALUATE,
    JOB_PHASE_PUBLISH,
    JOB_PHASE_QUANTIZE,
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
    JobPhase,
)
from support import fake_quantization_engine as fake_engine
from support.quantizing import Place, Quantizer, details, running


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
async def quantizer(place: Place) -> AsyncIterator[Quantizer]:
    async with running(place) as quantizer:
        yield quantizer


async def test_a_job_goes_through_every_phase_and_publishes_an_intact_artifact(quantizer: Quantizer) -> None:
    """From Create to an artifact that Get, List and Verify agree about."""
    spec = quantizer.place.spec()
    spec.engine_options.update({"max_num_seqs": 4, "hf_overrides": {"sliding_window": 64}})
    created = await quantizer.create(spec)
    events = await quantizer.history(created.job_id)
    phases = [event.job.phase for event in events if event.job.state == JOB_STATE_RUNNING]
    names = [JobPhase.Name(phase).removeprefix("JOB_PHASE_") for phase in dict.fromkeys(phases)]
    assert names == ["RESOLVE", "FETCH", "PREFLIGHT", "QUANTIZE", "EVALUATE", "SAVE", "VERIFY", "UPLOAD", "PUBLISH"]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[0].job.state == JOB_STATE_QUEUED
    done = events[-1].job
    assert (done.state, done.phase) == (JOB_STATE_SUCCEEDED, JOB_PHASE_PUBLISH)
    assert done.create_time.ToDatetime() <= done.start_time.ToDatetime() <= done.end_time.ToDatetime()
    assert done == await quantizer.get(created.job_id)

    request = artifact_service_pb2.GetArtifactRequest(uri=done.artifact_uri)
    artifact = (await quantizer.artifacts.GetArtifact(request)).artifact
    assert (artifact.job_id, artifact.name, artifact.engine) == (created.job_id, "tiny", "llmcompressor")
    assert artifact.recipe == done.spec.recipe
    assert artifact.engine_options == spec.engine_options
    assert artifact.evaluation.artifact_perplexity == 10.5
    listed = await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest())
    assert [item.uri for item in listed.artifacts] == [done.artifact_uri]
    verified = await quantizer.artifacts.VerifyArtifact(
        artifact_service_pb2.VerifyArtifactRequest(uri=done.artifact_uri)
    )
    assert verified.intact
    assert verified.verified_bytes == artifact.size_bytes
    assert quantizer.place.leftovers() == []


async def test_equal_work_makes_one_artifact_and_keeps_its_first_manifest(quantizer: Quantizer) -> None:
    """The digest is that of the content; the second job's URI is the first one's."""
    first = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    second = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    assert first.job_id != second.job_id
    assert first.artifact_uri == second.artifact_uri
    request = artifact_service_pb2.GetArtifactRequest(uri=second.artifact_uri)
    assert (await quantizer.artifacts.GetArtifact(request)).artifact.job_id == first.job_id


async def test_twenty_creates_at_once_with_one_request_id_make_one_job(quantizer: Quantizer) -> None:
    """However they race; another spec under the same id is refused."""
    spec = quantizer.place.spec()
    jobs = await asyncio.gather(*(quantizer.create(spec, "once") for _ in range(20)))
    assert len({job.job_id for job in jobs}) == 1
    listed = await quantizer.jobs.ListQuantizationJobs(quantizer_service_pb2.ListQuantizationJobsRequest())
    assert len(listed.jobs) == 1
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.create(quantizer.place.spec("another"), "once")
    assert failure.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert details(failure.value)[0].reason == "REQUEST_ID_REUSED"


@pytest.mark.parametrize(
    ("behaviour", "reason", "text"),
    [
        ("refuse", "TOO_FEW_SAMPLES", "the text has 3 samples"),
        ("crash", "ENGINE_CRASHED", "RuntimeError: out of luck"),
        ("die", "ENGINE_CRASHED", "memory"),
        ("babble", "ENGINE_PROTOCOL", "loading weights"),
    ],
)
async def test_an_engine_that_fails_fails_its_job_alone(
    quantizer: Quantizer, behaviour: str, reason: str, text: str
) -> None:
    """The job says why and leaves nothing; the next one succeeds."""
    fake_engine.behave(quantizer.place.engine, quantize=behaviour)
    failed = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    assert (failed.state, failed.phase, failed.error.reason) == (JOB_STATE_FAILED, JOB_PHASE_QUANTIZE, reason)
    assert text in failed.error.message
    assert quantizer.place.leftovers() == []
    fake_engine.behave(quantizer.place.engine)
    done = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    assert done.state == JOB_STATE_SUCCEEDED


@pytest.mark.parametrize("behaviour", ["hang", "stubborn"])
async def test_cancel_ends_a_running_engine_and_everything_it_started(quantizer: Quantizer, behaviour: str) -> None:
    """The process group is gone, nothing is published, and the queue goes on."""
    fake_engine.behave(quantizer.place.engine, quantize=behaviour)
    job = await quantizer.create(quantizer.place.spec())
    await quantizer.reaches(job.job_id, JOB_PHASE_QUANTIZE, completed=1)
    cancelled = await quantizer.cancel(job.job_id)
    assert (cancelled.state, cancelled.phase) == (JOB_STATE_CANCELLED, JOB_PHASE_QUANTIZE)
    assert cancelled.HasField("start_time")
    fake_engine.behave(quantizer.place.engine)
    next_job = await quantizer.finished((await quantizer.create(quantizer.place.spec("next"))).job_id)
    assert next_job.state == JOB_STATE_SUCCEEDED
    assert fake_engine.all_end(quantizer.place.engine)
    assert quantizer.place.leftovers() == []
    listed = await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest())
    assert [artifact.name for artifact in listed.artifacts] == ["next"]


async def test_a_queued_job_can_be_cancelled_and_its_watchers_hear_of_it(quantizer: Quantizer) -> None:
    """No worker ever sees the job, and the watch still ends with its final state."""
    fake_engine.behave(quantizer.place.engine, quantize="wait")
    first = await quantizer.create(quantizer.place.spec("first"))
    await quantizer.reaches(first.job_id, JOB_PHASE_QUANTIZE, completed=1)
    second = await quantizer.create(quantizer.place.spec("second"))
    watcher = asyncio.create_task(quantizer.history(second.job_id))
    assert (await quantizer.cancel(second.job_id)).state == JOB_STATE_CANCELLED
    assert [event.job.state for event in await watcher] == [JOB_STATE_QUEUED, JOB_STATE_CANCELLED]
    await asyncio.to_thread(fake_engine.open_gate, quantizer.place.engine)
    assert (await quantizer.finished(first.job_id)).state == JOB_STATE_SUCCEEDED
    assert (await quantizer.cancel(first.job_id)).state == JOB_STATE_SUCCEEDED


async def test_every_watcher_sees_the_same_history_live_and_afterwards(quantizer: Quantizer) -> None:
    """Ten from the start, one that comes back half way, and one that comes when all is over."""
    fake_engine.behave(quantizer.place.engine, evaluate="wait")
    job = await quantizer.create(quantizer.place.spec())
    watchers = [asyncio.create_task(quantizer.history(job.job_id)) for _ in range(10)]
    await quantizer.reaches(job.job_id, JOB_PHASE_EVALUATE, completed=1)
    late = asyncio.create_task(quantizer.history(job.job_id, after_sequence=3))
    await asyncio.to_thread(fake_engine.open_gate, quantizer.place.engine)
    histories = await asyncio.gather(*watchers)
    afterwards = await quantizer.history(job.job_id)
    assert all(history == afterwards for history in histories)
    assert await late == afterwards[3:]
    assert await quantizer.history(job.job_id, after_sequence=len(afterwards)) == []


async def test_the_list_pages_newest_first_and_filters_by_state(quantizer: Quantizer) -> None:
    """Every job comes once, whatever is created between two pages."""
    fake_engine.behave(quantizer.place.engine, quantize="refuse")
    created = [await quantizer.create(quantizer.place.spec()) for _ in range(3)]
    for job in created:
        await quantizer.finished(job.job_id)
    fake_engine.behave(quantizer.place.engine, quantize="wait")
    created.append(await quantizer.create(quantizer.place.spec()))
    await quantizer.reaches(created[-1].job_id, JOB_PHASE_QUANTIZE, completed=1)
    newest_first = [job.job_id for job in reversed(created)]

    async def page(token: str, states: list[int]) -> tuple[list[str], str]:
        request = quantizer_service_pb2.ListQuantizationJobsRequest(page_size=2, page_token=token, states=states)
        response = await quantizer.jobs.ListQuantizationJobs(request)
        return [job.job_id for job in response.jobs], response.next_page_token

    first, token = await page("", [])
    extra = await quantizer.create(quantizer.place.spec())
    second, end = await page(token, [])
    assert first + second == newest_first
    assert end == ""
    assert await page("", [JOB_STATE_RUNNING]) == ([created[-1].job_id], "")
    assert await page("", [JOB_STATE_QUEUED]) == ([extra.job_id], "")
    failed, token = await page("", [JOB_STATE_FAILED])
    rest, _ = await page(token, [JOB_STATE_FAILED])
    assert failed + rest == newest_first[1:]
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await page(token, [])
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details(failure.value)[1].field_violations[0].field == "page_token"


async def test_a_server_that_stops_leaves_its_job_running_for_the_next(place: Place) -> None:
    """The engine is ended, the job stays RUNNING, and the next server finishes it with its history intact."""
    async with running(place) as quantizer:
        fake_engine.behave(place.engine, quantize="hang")
        job = await quantizer.create(place.spec())
        await quantizer.reaches(job.job_id, JOB_PHASE_QUANTIZE, completed=1)
        before = await quantizer.get(job.job_id)
    assert before.state == JOB_STATE_RUNNING
    assert fake_engine.all_end(place.engine)
    fake_engine.behave(place.engine)
    async with running(place) as quantizer:
        done = await quantizer.finished(job.job_id)
        assert done.state == JOB_STATE_SUCCEEDED
        assert done.start_time == before.start_time
        assert place.leftovers() == []


async def test_a_stopping_server_ends_its_watches_as_unavailable(quantizer: Quantizer) -> None:
    """So that a client watches again, after the last sequence number that it saw."""
    fake_engine.behave(quantizer.place.engine, quantize="hang")
    job = await quantizer.create(quantizer.place.spec())
    await quantizer.reaches(job.job_id, JOB_PHASE_QUANTIZE, completed=1)
    watcher = asyncio.create_task(quantizer.history(job.job_id))
    await asyncio.sleep(0)
    quantizer.service.begin_stopping()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await watcher
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert details(failure.value)[0].reason == "SERVER_STOPPING"


async def test_a_source_that_breaks_after_create_fails_the_job_with_the_reason(quantizer: Quantizer) -> None:
    """The worker looks again, on the host that runs the job."""
    fake_engine.behave(quantizer.place.engine, quantize="wait")
    first = await quantizer.create(quantizer.place.spec("first"))
    await quantizer.reaches(first.job_id, JOB_PHASE_QUANTIZE, completed=1)
    second = await quantizer.create(quantizer.place.spec("second"))
    config = quantizer.place.source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Elsewhere"]}))
    await asyncio.to_thread(fake_engine.open_gate, quantizer.place.engine)
    failed = await quantizer.finished(second.job_id)
    assert failed.error.reason == "UNSUPPORTED_ARCHITECTURE"
    assert failed.error.metadata["phase"] == "PREFLIGHT"
