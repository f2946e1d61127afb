"""The phase VERIFY over RPC: what the serving engine says of a result decides whether it is published."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from bitmill.artifact.v1 import artifact_pb2, artifact_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import (
    JOB_PHASE_VERIFY,
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
)
from bitmill_quantizer.processes.verifier_process import VerifierProcess
from support import fake_quantization_engine as fake_engine
from support.quantizing import Place, Quantizer, details, running


@pytest.fixture
async def quantizer(tmp_path: Path) -> AsyncIterator[Quantizer]:
    async with running(Place(tmp_path)) as quantizer:
        yield quantizer


async def published(quantizer: Quantizer) -> artifact_pb2.Artifact:
    job = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    assert job.state == JOB_STATE_SUCCEEDED, job.error
    request = artifact_service_pb2.GetArtifactRequest(uri=job.artifact_uri)
    return (await quantizer.artifacts.GetArtifact(request)).artifact


async def test_what_the_serving_engine_generated_is_in_the_artifact(quantizer: Quantizer) -> None:
    verification = (await published(quantizer)).verification
    assert (verification.text, verification.num_tokens, verification.device) == (" Paris.", 16, "cpu")
    assert dict(verification.versions) == {"fake-vllm": "2.0"}
    assert verification.skipped == ""


@pytest.mark.parametrize(
    ("behaviour", "reason", "text"),
    [
        ("refuse", "TOO_FEW_SAMPLES", "the text has 3 samples"),
        ("crash", "ENGINE_CRASHED", "RuntimeError: out of luck"),
        ("die", "ENGINE_CRASHED", "SIGKILL"),
    ],
)
async def test_a_result_that_does_not_serve_is_not_published(
    quantizer: Quantizer, behaviour: str, reason: str, text: str
) -> None:
    fake_engine.behave(quantizer.place.engine, verify=behaviour)
    failed = await quantizer.finished((await quantizer.create(quantizer.place.spec())).job_id)
    assert (failed.state, failed.phase, failed.error.reason) == (JOB_STATE_FAILED, JOB_PHASE_VERIFY, reason)
    assert text in failed.error.message
    listed = await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest())
    assert list(listed.artifacts) == []
    assert quantizer.place.leftovers() == []


async def test_cancel_ends_a_running_verification(quantizer: Quantizer) -> None:
    fake_engine.behave(quantizer.place.engine, verify="hang")
    job = await quantizer.create(quantizer.place.spec())
    await quantizer.reaches(job.job_id, JOB_PHASE_VERIFY, completed=1)
    assert (await quantizer.cancel(job.job_id)).state == JOB_STATE_CANCELLED
    fake_engine.behave(quantizer.place.engine)
    await published(quantizer)
    assert fake_engine.all_end(quantizer.place.engine)


async def test_a_verifier_that_is_not_installed_is_said_at_create(tmp_path: Path) -> None:
    """Not after hours of work."""
    place = Place(tmp_path)
    missing = VerifierProcess(tmp_path / "none", "fake_verifier", "`make setup` installs it")
    shop = place.workshop()
    shop = replace(shop, verifier=missing, planner=replace(shop.planner, verifier=missing))
    async with running(place, shop) as quantizer:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await quantizer.create(place.spec())
    assert failure.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(failure.value)[0].reason == "ENGINE_NOT_INSTALLED"


async def test_without_a_verifier_the_artifact_says_that_it_is_unverified(tmp_path: Path) -> None:
    place = Place(tmp_path)
    shop = place.workshop()
    shop = replace(shop, verifier=None, planner=replace(shop.planner, verifier=None))
    async with running(place, shop) as quantizer:
        assert not (await published(quantizer)).HasField("verification")
