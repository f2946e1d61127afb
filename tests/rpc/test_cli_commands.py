"""The command line against a real server: what it sends, prints and exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.artifact.v1.artifact_pb2 import Artifact, Device, DeviceSupport, Evaluation
from bitmill.artifact.v1.recipe_pb2 import Recipe, Scheme
from bitmill.cli import app
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.generation_pb2 import Finish, FinishReason
from bitmill.inference.v1.model_pb2 import LoadPhase, Model, ModelError, ModelState
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
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


def bitmill(server: FakeServer, *arguments: str, stdin: str | None = None) -> Result:
    addresses = {"BITMILL_QUANTIZER": server.address, "BITMILL_INFERENCE": server.address}
    return CliRunner().invoke(app, list(arguments), env=addresses, input=stdin)


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
        assert "cpu, cuda (compute capability 7.5)" in result.stdout

    def test_every_option_reaches_the_server(self, server: FakeServer, tmp_path: Path) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=job()))
        options = "--scheme w8a16 --group-size 32 --symmetric --ignore lm_head --ignore re:.*gate --num-samples 8"
        more = "--max-sequence-length 256 --dampening-frac 0.02 --seed 3 --evaluation-tokens 512 --request-id r1"
        calibration = tmp_path / "chats.jsonl"
        result = bitmill(
            server, "quantize", str(tmp_path / "model"), "m", "--detach", *options.split(), *more.split(),
            "--calibration", str(calibration),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        request = server.only_call("CreateQuantizationJob").request
        spec = request.spec
        assert (request.request_id, spec.source_uri) == ("r1", (tmp_path / "model").as_uri())
        assert spec.recipe == Recipe(
            scheme=Scheme.SCHEME_W8A16, group_size=32, symmetric=True, ignore=["lm_head", "re:.*gate"],
            dampening_frac=0.02, seed=3,
        )  # fmt: skip
        assert (spec.calibration.uri, spec.calibration.num_samples) == (calibration.as_uri(), 8)
        assert (spec.calibration.max_sequence_length, spec.evaluation.num_tokens) == (256, 512)

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
            estimated_artifact_size_bytes=89_000_000,
        )  # fmt: skip
        server.on("PlanQuantization", plan)
        result = bitmill(server, "quantize", "s3://bucket/m", "m", "--plan")
        assert result.exit_code == 0
        for part in ("LlamaForCausalLM", "134,515,008", "106,168,320 in 210 layers", "269.0 MB → about 89.0 MB"):
            assert part in result.stdout
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
        assert "12.500 → 13.250" in bitmill(server, "artifacts", "show", URI).stdout
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


class TestModels:
    def test_load_follows_the_phases_until_it_serves(self, server: FakeServer) -> None:
        loading = Model(name="m", state=ModelState.MODEL_STATE_LOADING, phase=LoadPhase.LOAD_PHASE_FETCH)
        starting = Model(name="m", state=ModelState.MODEL_STATE_LOADING, phase=LoadPhase.LOAD_PHASE_START_ENGINE)
        serving = Model(name="m", state=ModelState.MODEL_STATE_SERVING, quantization="compressed-tensors")
        server.on("LoadModel", model_pb.LoadModelResponse(model=loading))
        changes = [model_pb.WatchModelResponse(model=model) for model in (loading, loading, starting, serving)]
        server.on("WatchModel", [*changes, Hang()])
        result = bitmill(server, "models", "load", URI, "--name", "m", "--max-model-len", "512", "--enforce-eager")
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines() == ["fetch", "start engine"]
        assert "compressed-tensors" in result.stdout
        request = server.only_call("LoadModel").request
        assert request.return_immediately
        assert (request.engine_options.max_model_len, request.engine_options.enforce_eager) == (512, True)

    def test_a_model_that_cannot_be_loaded_exits_with_1(self, server: FakeServer) -> None:
        error = ModelError(reason="ARTIFACT_CORRUPT", message="2 files differ", metadata={"files": "a, b"})
        failed = Model(name="m", state=ModelState.MODEL_STATE_FAILED, error=error)
        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m")))
        server.on("WatchModel", [model_pb.WatchModelResponse(model=failed)])
        result = bitmill(server, "models", "load", URI)
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "error: model m failed ARTIFACT_CORRUPT: 2 files differ",
            "  files=a, b",
        ]

    def test_list_show_and_unload(self, server: FakeServer) -> None:
        model = Model(name="m", state=ModelState.MODEL_STATE_SERVING, max_model_len=2048)
        server.on("ListModels", model_pb.ListModelsResponse(models=[model]))
        server.on("GetModel", model_pb.GetModelResponse(model=model))
        server.on("UnloadModel", model_pb.UnloadModelResponse())
        assert "2048" in bitmill(server, "models", "list").stdout
        assert "2048 tokens" in bitmill(server, "models", "show", "m").stdout
        assert bitmill(server, "models", "unload", "m").exit_code == 0


class TestGeneration:
    CHUNKS = (
        inference_pb.GenerateResponse(text="Once ü"),
        inference_pb.GenerateResponse(text="pon\n", finish=Finish(reason=FinishReason.FINISH_REASON_STOP)),
    )

    def test_generate_prints_the_text(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        result = bitmill(
            server, "generate", "Hi", "--max-tokens", "8", "--temperature", "0", "--stop", "a", "--stop", "b"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (0, "Once üpon\n\n", "")
        request = server.only_call("Generate").request
        params = request.sampling_params
        assert (request.text, params.max_tokens, params.stop) == ("Hi", 8, ["a", "b"])
        assert params.HasField("temperature")
        assert not params.HasField("ignore_eos")

    def test_generate_reads_standard_input(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        bitmill(server, "generate", "-", stdin="from a pipe")
        assert server.only_call("Generate").request.text == "from a pipe"

    def test_generate_prints_a_chunk_before_the_next_one_comes(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Generate", [self.CHUNKS[0], hang, self.CHUNKS[1]])
        command = [sys.executable, "-m", "bitmill.cli", "generate", "Hi", "--inference", server.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            assert run.stdout.read(7).decode() == "Once ü"
            hang.release.set()
            assert run.communicate(timeout=60)[0].decode() == "pon\n\n"

    def test_json_prints_one_chunk_a_line(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        chunks = [json.loads(line) for line in bitmill(server, "generate", "Hi", "--json").stdout.splitlines()]
        assert [chunk["text"] for chunk in chunks] == ["Once ü", "pon\n"]

    def test_chat_sends_the_system_message_first(self, server: FakeServer) -> None:
        server.on("Chat", [inference_pb.ChatResponse(content="Hello.")])
        result = bitmill(server, "chat", "Hi", "--system", "be brief", "--model", "m", "--top-k", "5")
        assert result.stdout == "Hello.\n"
        request = server.only_call("Chat").request
        assert [(message.role, message.content) for message in request.messages] == [
            ("system", "be brief"),
            ("user", "Hi"),
        ]
        assert (request.model, request.sampling_params.top_k) == ("m", 5)

    def test_chat_without_a_terminal_reads_the_message(self, server: FakeServer) -> None:
        server.on("Chat", [inference_pb.ChatResponse(content="Hello.")])
        bitmill(server, "chat", stdin="from a pipe")
        assert server.only_call("Chat").request.messages[0].content == "from a pipe"

    def test_an_error_in_the_middle_leaves_what_came_and_exits_with_1(self, server: FakeServer) -> None:
        server.on("Generate", [self.CHUNKS[0], errors.InternalError("ENGINE_DEAD", "the engine died")])
        result = bitmill(server, "generate", "Hi")
        assert (result.exit_code, result.stdout) == (1, "Once ü")
        assert "ENGINE_DEAD" in result.stderr


class TestGlobal:
    def test_an_address_that_nobody_serves_says_which_option_is_meant(self, server: FakeServer) -> None:
        server.stop()
        result = bitmill(server, "models", "list")
        assert result.exit_code == 1
        assert f"is the inference service running at {server.address}?" in result.stderr
        assert "--inference or BITMILL_INFERENCE" in result.stderr

    def test_the_other_services_address_is_recognised(self, server: FakeServer) -> None:
        result = bitmill(server, "jobs", "list")
        assert "is it the quantizer service?" in result.stderr

    def test_an_address_option_wins_over_the_environment(self, server: FakeServer) -> None:
        server.on("ListModels", model_pb.ListModelsResponse())
        result = CliRunner().invoke(
            app, ["models", "list", "--inference", server.address], env={"BITMILL_INFERENCE": "127.0.0.1:1"}
        )
        assert result.exit_code == 0

    def test_a_closed_standard_output_is_no_failure(self, server: FakeServer) -> None:
        server.on("ListModels", model_pb.ListModelsResponse())
        command = [sys.executable, "-m", "bitmill.cli", "models", "list", "--inference", server.address]
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_the_timeout_is_the_calls_deadline(self, server: FakeServer) -> None:
        server.on("ListModels", Hang())
        result = bitmill(server, "models", "list", "--timeout", "0.2")
        assert result.exit_code == 1
        assert "DEADLINE_EXCEEDED" in result.stderr
        assert "--timeout SECONDS waits longer" in result.stderr

    def test_a_refusal_tells_when_to_try_again(self, server: FakeServer) -> None:
        server.on("Generate", errors.UnavailableError("QUEUE_FULL", "queue full", retry_after=timedelta(seconds=2)))
        result = bitmill(server, "generate", "Hi")
        assert "try again after 2 s" in result.stderr
        assert "running at" not in result.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ["quantize", "s3://b/m"],
            ["quantize", "s3://b/m", "m", "--scheme", "W3A3"],
            ["quantize", "s3://b/m", "m", "--num-samples", "0"],
            ["quantize", "s3://b/m", "m", "--num-samples", str(2**32)],
            ["quantize", "s3://b/m", "m", "--seed", str(2**64)],
            ["generate", "hi", "--max-tokens", "-1"],
            ["generate", "hi", "--seed", str(2**63)],
            ["jobs", "list", "--state", "DONE"],
            ["jobs", "list", "--timeout"],
            ["jobs", "list", "--limit", str(2**64)],
            ["artifacts", "list", "--limit", str(2**64)],
            ["nonsense"],
        ],
    )
    def test_wrong_usage_exits_with_2_and_sends_nothing(self, server: FakeServer, arguments: list[str]) -> None:
        result = bitmill(server, *arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr
        assert not isinstance(result.exception, ValueError)
        assert not server.received
