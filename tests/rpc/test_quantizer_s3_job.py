"""A job from one bucket into another: moto's S3 server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitmill.artifact.v1 import artifact_service_pb2
from bitmill.quantizer.v1 import quantizer_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import JOB_STATE_SUCCEEDED
from bitmill_common.stores import Stores
from support.object_stores import S3Server, run_s3_server
from support.quantizing import Place, running


@pytest.fixture
def s3_server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


async def test_a_job_brings_source_and_text_from_s3_and_publishes_there(tmp_path: Path, s3_server: S3Server) -> None:
    """The copy on the worker's disk is planned for, used and removed."""
    place = Place(tmp_path)
    models, artifacts = s3_server.create_bucket(), s3_server.create_bucket()
    for path in place.source.iterdir():
        s3_server.client.upload_file(str(path), models, f"llms/tiny/{path.name}")
    s3_server.client.put_object(Bucket=models, Key="texts/chat.jsonl", Body=b'{"messages": []}')
    root = f"s3://{artifacts}/made"
    shop = place.workshop_in(Stores([f"s3://{models}"], s3_server.options), Stores([root], s3_server.options), root)
    spec = place.spec()
    spec.source_uri = f"s3://{models}/llms/tiny"
    spec.calibration.uri = f"s3://{models}/texts/chat.jsonl"
    async with running(place, shop) as quantizer:
        plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
        assert plan.estimated_disk_bytes == plan.source_size_bytes + plan.estimated_artifact_size_bytes
        done = await quantizer.finished((await quantizer.create(spec)).job_id)
        assert done.state == JOB_STATE_SUCCEEDED, done.error
        assert done.artifact_uri.startswith(f"{root}/artifacts/tiny/")
        request = artifact_service_pb2.VerifyArtifactRequest(uri=done.artifact_uri)
        assert (await quantizer.artifacts.VerifyArtifact(request)).intact
    assert place.leftovers() == []
    listed = s3_server.client.list_objects_v2(Bucket=artifacts)["Contents"]
    manifest = next(item["Key"] for item in listed if item["Key"].endswith("manifest.json"))
    body = s3_server.client.get_object(Bucket=artifacts, Key=manifest)["Body"].read()
    assert json.loads(body)["source"]["size_bytes"] == plan.source_size_bytes
