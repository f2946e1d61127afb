"""A GGUF file as the source of a job: alone, whatever lies beside it, on this host's disk or in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bitmill.quantizer.v1 import quantizer_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import JOB_STATE_SUCCEEDED
from bitmill_common.stores import Stores
from support.gguf_files import write_gguf
from support.object_stores import S3Server, run_s3_server
from support.quantizing import Place, running


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With two GGUF files in one directory."""
    place = Place(tmp_path)
    write_gguf(place.sources / "llms" / "tiny-Q4_K.gguf")
    write_gguf(place.sources / "llms" / "other.gguf")
    return place


@pytest.fixture
def s3_server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


async def test_a_job_takes_the_one_file_that_its_uri_names(place: Place) -> None:
    """In place; the directory alone would not say which."""
    path = place.sources / "llms" / "tiny-Q4_K.gguf"
    spec = place.spec()
    async with running(place) as quantizer:
        spec.source_uri = path.parent.as_uri()
        plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
        assert [problem.reason for problem in plan.problems] == ["GGUF_AMBIGUOUS"]
        spec.source_uri = path.as_uri()
        plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
        assert not plan.problems
        assert plan.source_size_bytes == path.stat().st_size
        done = await quantizer.finished((await quantizer.create(spec)).job_id)
    assert done.state == JOB_STATE_SUCCEEDED, done.error
    assert place.leftovers() == []


async def test_a_plan_reads_a_uri_as_the_job_will(place: Place) -> None:
    """Without the slash at its end: what ends as a GGUF file does is one."""
    (place.sources / "llms" / "tiny-Q4_K.gguf").rename(place.sources / "tiny-Q4_K.gguf")
    directory = place.source.rename(place.sources / "model.gguf")
    spec = place.spec()
    async with running(place) as quantizer:
        for path, reasons in ((place.sources / "tiny-Q4_K.gguf", []), (directory, ["SOURCE_NOT_FOUND"])):
            spec.source_uri = f"{path.as_uri()}/"
            plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
            assert [problem.reason for problem in plan.problems] == reasons


async def test_a_file_in_a_bucket_is_fetched_alone(place: Place, s3_server: S3Server) -> None:
    """Of its directory nothing else is copied."""
    models = s3_server.create_bucket()
    path = place.sources / "llms" / "tiny-Q4_K.gguf"
    for name in ("tiny-Q4_K.gguf", "other.gguf"):
        s3_server.client.upload_file(str(path.parent / name), models, f"llms/{name}")
    artifact_root = place.artifacts.as_uri()
    shop = place.workshop_in(Stores([f"s3://{models}"], s3_server.options), Stores([artifact_root]), artifact_root)
    spec = place.spec()
    spec.source_uri = f"s3://{models}/llms/tiny-Q4_K.gguf"
    async with running(place, shop) as quantizer:
        plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
        assert plan.estimated_disk_bytes == path.stat().st_size + plan.estimated_artifact_size_bytes
        done = await quantizer.finished((await quantizer.create(spec)).job_id)
    assert done.state == JOB_STATE_SUCCEEDED, done.error
    assert place.leftovers() == []
