"""The main job on real parts: llm-compressor, an S3 server and vLLM, driven by the client as its users drive it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import local_servers
from bitmill import InferenceClient, QuantizerClient, errors
from bitmill.artifact.v1 import artifact_pb2
from support.object_stores import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, run_s3_server

REPOSITORY = Path(__file__).parents[2]
BUF = REPOSITORY / ".venv/bin/buf"
JOB_TIMEOUT_S = 240
ENGINE_OPTIONS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 8}
RECIPES: dict[str, dict[str, Any]] = {"W4A16": {"group_size": 32}, "W8A16": {"group_size": 32}, "W8A8_INT8": {}}


@dataclass(frozen=True)
class Line:
    """Both servers over one S3 bucket, and the artifact that each scheme's job made."""

    s3: S3Server
    bucket: str
    quantizer: QuantizerClient
    inference: InferenceClient
    artifacts: dict[str, artifact_pb2.Artifact]

    def quantize(self, scheme: str, **recipe: Any) -> artifact_pb2.Artifact:
        """Runs a job on the tiny checkpoint in the bucket and returns what it made."""
        job = self.quantizer.quantize(
            f"s3://{self.bucket}/sources/tiny",
            f"tiny-{scheme.lower().replace('_', '-')}",
            scheme=scheme,
            num_samples=16,
            max_sequence_length=64,
            evaluation_tokens=256,
            **recipe,
        )
        return self.quantizer.artifact(self.quantizer.wait(job.job_id, timeout=JOB_TIMEOUT_S).artifact_uri)


@pytest.fixture(scope="module")
def line(tiny_checkpoint: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    root = tmp_path_factory.mktemp("main-job")
    services = REPOSITORY / "services"
    with run_s3_server() as s3:
        bucket = s3.create_bucket()
        for path in tiny_checkpoint.iterdir():
            s3.client.upload_file(str(path), bucket, f"sources/tiny/{path.name}")
        credentials = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": "us-east-1",
        }
        quantizer_settings = credentials | {
            "BITMILL_QUANTIZER_ADDRESS": "127.0.0.1:0",
            "BITMILL_QUANTIZER_SOURCE_ROOTS": f"s3://{bucket}/sources",
            "BITMILL_QUANTIZER_ARTIFACT_ROOT": f"s3://{bucket}/store",
            "BITMILL_QUANTIZER_WORK_DIR": str(root / "work"),
            "BITMILL_QUANTIZER_LLMCOMPRESSOR_PYTHON": str(engine_python),
            "BITMILL_QUANTIZER_S3_ENDPOINT": s3.endpoint,
            "BITMILL_QUANTIZER_S3_ALLOW_HTTP": "true",
        }
        inference_settings = credentials | {
            "BITMILL_INFERENCE_ADDRESS": "127.0.0.1:0",
            "BITMILL_INFERENCE_MODEL_ROOTS": f"s3://{bucket}/store",
            "BITMILL_INFERENCE_CACHE_DIR": str(root / "cache"),
            "BITMILL_INFERENCE_S3_ENDPOINT": s3.endpoint,
            "BITMILL_INFERENCE_S3_ALLOW_HTTP": "true",
        }
        quantizer_python = services / "quantizer/.venv/bin/python"
        inference_python = services / "inference/.venv/bin/python"
        with (
            local_servers.server(
                "bitmill_quantizer", quantizer_python, quantizer_settings, root / "quantizer.log"
            ) as quantizer_address,
            local_servers.server(
                "bitmill_inference", inference_python, inference_settings, root / "inference.log"
            ) as inference_address,
            QuantizerClient(quantizer_address) as quantizer,
            InferenceClient(inference_address) as inference,
        ):
            line = Line(s3, bucket, quantizer, inference, {})
            line.artifacts.update({scheme: line.quantize(scheme, **recipe) for scheme, recipe in RECIPES.items()})
            yield line


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8_INT8"])
@pytest.mark.timeout(600)
def test_a_checkpoint_in_a_bucket_becomes_an_artifact_that_answers(scheme: str, line: Line) -> None:
    artifact = line.artifacts[scheme]
    assert artifact.size_bytes < artifact.source_size_bytes
    assert artifact.evaluation.num_tokens > 0
    assert (artifact.verification.num_tokens, artifact.verification.device) == (16, "cpu")
    assert line.quantizer.verify(artifact.uri).intact

    model = line.inference.load_model(artifact.uri, **ENGINE_OPTIONS)

    assert model.name == artifact.name
    assert model.digest == artifact.digest
    assert model.quantization == "compressed-tensors"
    chunks = list(line.inference.generate("The import statement", model=model.name, max_tokens=12, ignore_eos=True))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 12
    answers = list(line.inference.chat("Hello", model=model.name, max_tokens=8, ignore_eos=True))
    assert answers[-1].usage.completion_tokens == 8
    line.inference.unload_model(model.name)


def test_an_artifact_that_this_device_cannot_serve_is_refused_before_an_engine_starts(line: Line) -> None:
    with pytest.raises(errors.FailedPreconditionError) as refusal:
        line.inference.load_model(line.artifacts["W8A16"].uri)
    assert refusal.value.reason == "DEVICE_UNSUPPORTED"
    assert "CUDA" in str(refusal.value)


def test_a_damaged_artifact_is_data_loss_and_nothing_is_loaded(line: Line) -> None:
    artifact = line.quantize("W4A16", algorithm="RTN", group_size=-1)  # one that the server's cache has not
    key = artifact.uri.removeprefix(f"s3://{line.bucket}/") + "/config.json"
    original = line.s3.client.get_object(Bucket=line.bucket, Key=key)["Body"].read()
    line.s3.client.put_object(Bucket=line.bucket, Key=key, Body=original.replace(b"{", b" ", 1))
    try:
        with pytest.raises(errors.DataLossError) as loss:
            line.inference.load_model(artifact.uri, name="damaged")
        assert "config.json" in str(loss.value)
        assert not line.quantizer.verify(artifact.uri).intact
    finally:
        line.s3.client.put_object(Bucket=line.bucket, Key=key, Body=original)


def test_buf_curl_lists_the_quantizers_methods_by_reflection(line: Line) -> None:
    methods = subprocess.run(
        [
            *(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--list-methods"),
            f"http://{line.quantizer.address}",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert "bitmill.quantizer.v1.QuantizerService/CreateQuantizationJob" in methods
    assert "bitmill.artifact.v1.ArtifactService/VerifyArtifact" in methods
