"""What QuantizerService and ArtifactService answer, good and bad, with a job board in memory behind them."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from bitmill.artifact.v1 import artifact_pb2, artifact_service_pb2, recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from bitmill_common.artifact import ArtifactFile
from bitmill_common.artifacts import publish_manifest
from bitmill_common.stores import Stores
from bitmill_quantizer.jobs.job import JobError, JobState
from bitmill_quantizer.paging import make_token
from support.checkpoints import write_checkpoint
from support.fake_job_board import FakeJobBoard
from support.manifests import make_manifest
from support.quantizing import Place, Quantizer, details, serving

Spec = quantization_job_pb2.QuantizationSpec


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def board() -> FakeJobBoard:
    return FakeJobBoard()


@pytest.fixture
async def quantizer(place: Place, board: FakeJobBoard) -> AsyncIterator[Quantizer]:
    async with serving(place, board, place.workshop()) as quantizer:
        yield quantizer


async def refusal(quantizer: Quantizer, spec: Spec) -> grpc.aio.AioRpcError:
    """Returns how Create fails, after making sure that Plan names the same reason and that no job came of it."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.create(spec)
    plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
    info, bad_request = details(failure.value)
    violations = {violation.reason for violation in bad_request.field_violations}
    assert (violations or {info.reason}) <= {problem.reason for problem in plan.problems}
    listed = await quantizer.jobs.ListQuantizationJobs(quantizer_service_pb2.ListQuantizationJobsRequest())
    assert list(listed.jobs) == []
    return failure.value


async def test_create_returns_the_queued_job_with_every_default_filled_in(quantizer: Quantizer) -> None:
    job = await quantizer.create(quantizer.place.spec())
    assert job.state == quantization_job_pb2.JOB_STATE_QUEUED
    assert job.HasField("create_time")
    assert not job.HasField("start_time")
    assert job.spec.recipe == recipe_pb2.Recipe(
        scheme=recipe_pb2.SCHEME_W4A16,
        group_size=32,
        symmetric=True,
        ignore=["lm_head"],
        dampening_frac=0.01,
        seed=0,
        algorithm=recipe_pb2.ALGORITHM_GPTQ,
        activation_order=recipe_pb2.ACTIVATION_ORDER_STATIC,
    )
    assert job.spec.calibration.packing == recipe_pb2.PACKING_CONCATENATE
    assert job.spec.engine == "llmcompressor"
    again = await quantizer.create(job.spec)
    assert again.spec == job.spec
    assert again.job_id != job.job_id


async def test_a_returned_int8_spec_is_accepted_as_it_is(quantizer: Quantizer) -> None:
    """Its group size stays unset, which the scheme wants."""
    spec = quantizer.place.spec()
    spec.recipe.CopyFrom(recipe_pb2.Recipe(scheme=recipe_pb2.SCHEME_W8A8_INT8))
    job = await quantizer.create(spec)
    assert not job.spec.recipe.HasField("group_size")
    assert (await quantizer.create(job.spec)).spec == job.spec


async def test_a_specs_engine_options_come_back_as_they_were(quantizer: Quantizer) -> None:
    """Numbers, texts and what is nested; the inference service is the one to check them."""
    spec = quantizer.place.spec()
    spec.engine_options.update({"max_model_len": 64, "dtype": "auto", "hf_overrides": {"layers": [1, 2.5, None]}})
    job = await quantizer.create(spec)
    assert job.spec.engine_options == spec.engine_options
    assert (await quantizer.create(job.spec)).spec == job.spec
    spec.engine_options.update({"max_model_len": math.inf})
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.create(spec)
    assert details(failure.value)[1].field_violations[0].field == "spec.engine_options.max_model_len"


async def test_a_request_id_finds_its_job_though_the_source_is_gone(quantizer: Quantizer) -> None:
    """A retried call must not fail for what happened since."""
    job = await quantizer.create(quantizer.place.spec(), "mine")
    shutil.rmtree(quantizer.place.source)
    assert (await quantizer.create(quantizer.place.spec(), "mine")).job_id == job.job_id


async def test_a_request_id_that_is_too_long_is_refused(quantizer: Quantizer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.create(quantizer.place.spec(), "x" * 129)
    assert details(failure.value)[1].field_violations[0].field == "request_id"


async def test_plan_tells_sizes_and_devices(quantizer: Quantizer) -> None:
    request = quantizer_service_pb2.PlanQuantizationRequest(spec=quantizer.place.spec())
    plan = await quantizer.jobs.PlanQuantization(request)
    assert list(plan.problems) == []
    assert (plan.architecture, plan.num_quantized_modules) == ("LlamaForCausalLM", 14)
    assert 0 < plan.num_quantized_parameters < plan.num_parameters
    assert 0 < plan.estimated_artifact_size_bytes < plan.source_size_bytes
    assert plan.estimated_disk_bytes == plan.estimated_artifact_size_bytes  # the source is local and not copied
    assert plan.estimated_host_memory_bytes > plan.source_size_bytes
    assert [device.device for device in plan.devices] == [artifact_pb2.DEVICE_CPU, artifact_pb2.DEVICE_CUDA]


async def test_plan_names_every_problem_of_request_and_checkpoint_at_once(quantizer: Quantizer) -> None:
    """Wrong fields, a quantized checkpoint and an engine that is missing, in one answer."""
    write_checkpoint(quantizer.place.sources / "bad", config={"quantization_config": {"quant_method": "awq"}})
    quantizer.place.engine_python.chmod(0o600)
    spec = quantizer.place.spec("Bad Name", group_size=7)
    spec.source_uri = (quantizer.place.sources / "bad").as_uri()
    plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
    assert {(problem.field, problem.reason) for problem in plan.problems} == {
        ("spec.artifact_name", "INVALID_NAME"),
        ("spec.recipe.group_size", "UNSUPPORTED_GROUP_SIZE"),
        ("", "ALREADY_QUANTIZED"),
        ("", "ENGINE_NOT_INSTALLED"),
    }
    assert plan.spec == spec


def _set(spec: Spec, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        spec = getattr(spec, parent)
    setattr(spec, name, value)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("source_uri", "", "REQUIRED"),
        ("source_uri", "http://example.com/model", "INVALID_URI"),
        ("source_uri", "file:///models/../etc", "INVALID_URI"),
        ("artifact_name", "../x", "INVALID_NAME"),
        ("recipe.scheme", 0, "REQUIRED"),
        ("recipe.scheme", 99, "UNKNOWN_SCHEME"),
        ("recipe.group_size", 128, "GROUP_SIZE_DOES_NOT_DIVIDE"),
        ("recipe.dampening_frac", 2.0, "OUT_OF_RANGE"),
        ("calibration.max_sequence_length", 512, "EXCEEDS_CONTEXT_LENGTH"),
        ("calibration.uri", "file:///x.csv", "UNSUPPORTED_CALIBRATION_FORMAT"),
        ("evaluation.num_tokens", 1, "OUT_OF_RANGE"),
    ],
)
async def test_a_wrong_field_is_an_invalid_argument_that_names_it(
    quantizer: Quantizer, path: str, value: object, reason: str
) -> None:
    spec = quantizer.place.spec()
    _set(spec, path, value)
    error = await refusal(quantizer, spec)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details(error)[1].field_violations
    assert (violation.field, violation.reason) == (f"spec.{path}", reason)


async def test_several_wrong_fields_are_named_in_one_answer(quantizer: Quantizer) -> None:
    """Those that the checkpoint tells of among them."""
    spec = quantizer.place.spec(group_size=128, ignore=["re:nothing"])
    spec.calibration.max_sequence_length = 4096
    error = await refusal(quantizer, spec)
    assert {violation.field for violation in details(error)[1].field_violations} == {
        "spec.recipe.group_size",
        "spec.recipe.ignore[0]",
        "spec.calibration.max_sequence_length",
    }


def _lose_config(source: Path) -> None:
    (source / "config.json").unlink()


def _break_config(source: Path) -> None:
    (source / "config.json").write_text("{")


def _lose_shard(source: Path) -> None:
    shutil.rmtree(source)
    write_checkpoint(source, num_shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()


def _pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def _cut_weights(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _lose_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()


def _quantized(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


def _other_model(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["T5ForConditionalGeneration"]}))


@pytest.mark.parametrize(
    ("breakage", "reason"),
    [
        (shutil.rmtree, "SOURCE_NOT_FOUND"),
        (_lose_config, "CONFIG_MISSING"),
        (_break_config, "CONFIG_INVALID"),
        (_lose_shard, "SHARD_MISSING"),
        (_pickle, "PICKLE_ONLY"),
        (_cut_weights, "HEADER_INVALID"),
        (_lose_tokenizer, "TOKENIZER_MISSING"),
        (_quantized, "ALREADY_QUANTIZED"),
        (_other_model, "UNSUPPORTED_ARCHITECTURE"),
    ],
)
async def test_a_checkpoint_that_cannot_be_used_is_a_failed_precondition(
    quantizer: Quantizer, breakage: Callable[[Path], None], reason: str
) -> None:
    breakage(quantizer.place.source)
    error = await refusal(quantizer, quantizer.place.spec())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)[0].reason == reason


async def test_a_source_outside_the_roots_is_denied(quantizer: Quantizer, tmp_path: Path) -> None:
    spec = quantizer.place.spec()
    spec.source_uri = write_checkpoint(tmp_path / "elsewhere").as_uri()
    error = await refusal(quantizer, spec)
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert details(error)[0].reason == "URI_OUTSIDE_ROOTS"


async def test_a_calibration_text_that_is_not_there_is_not_found(quantizer: Quantizer) -> None:
    spec = quantizer.place.spec()
    spec.calibration.uri = (quantizer.place.sources / "text.jsonl").as_uri()
    error = await refusal(quantizer, spec)
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert details(error)[0].reason == "CALIBRATION_NOT_FOUND"
    (quantizer.place.sources / "text.jsonl").write_text("{}")
    assert (await quantizer.create(spec)).spec.calibration.uri == spec.calibration.uri


async def test_a_missing_engine_is_a_failed_precondition_that_says_how_to_install_it(quantizer: Quantizer) -> None:
    quantizer.place.engine_python.unlink()
    error = await refusal(quantizer, quantizer.place.spec())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)[0].reason == "ENGINE_NOT_INSTALLED"
    assert "install it" in error.details()


@pytest.mark.parametrize(("limit", "reason"), [("disk_bytes", "NO_SPACE"), ("total_memory_bytes", "NOT_ENOUGH_MEMORY")])
async def test_a_job_too_large_for_the_server_is_resource_exhausted(
    quantizer: Quantizer, limit: str, reason: str
) -> None:
    setattr(quantizer.place.host, limit, 1000)
    error = await refusal(quantizer, quantizer.place.spec())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error)[0].reason == reason


@pytest.mark.parametrize("method", ["GetQuantizationJob", "CancelQuantizationJob", "WatchQuantizationJob"])
@pytest.mark.parametrize(
    ("job_id", "code"), [("", grpc.StatusCode.INVALID_ARGUMENT), ("job-0", grpc.StatusCode.NOT_FOUND)]
)
async def test_an_unknown_job_is_not_found_by(
    quantizer: Quantizer, method: str, job_id: str, code: grpc.StatusCode
) -> None:
    request = getattr(quantizer_service_pb2, f"{method}Request")(job_id=job_id)
    call = getattr(quantizer.jobs, method)(request)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await (call.read() if method == "WatchQuantizationJob" else call)
    assert failure.value.code() == code
    assert details(failure.value)[0].reason == ("JOB_NOT_FOUND" if job_id else "REQUIRED")


async def test_unknown_states_of_a_filter_are_refused(quantizer: Quantizer) -> None:
    request = quantizer_service_pb2.ListQuantizationJobsRequest(states=[2, 0, 77])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.jobs.ListQuantizationJobs(request)
    fields = [violation.field for violation in details(failure.value)[1].field_violations]
    assert fields == ["states[1]", "states[2]"]


async def test_a_watch_follows_until_the_final_state(quantizer: Quantizer, board: FakeJobBoard) -> None:
    """History first, then what happens, and the error of a failed job whole."""
    job = await quantizer.create(quantizer.place.spec())
    watch = quantizer.watch(job.job_id)
    assert (await anext(watch)).sequence == 1
    board.set_state(job.job_id, JobState.RUNNING)
    assert (await anext(watch)).job.state == quantization_job_pb2.JOB_STATE_RUNNING
    text = "x" * 5000
    board.set_state(job.job_id, JobState.FAILED, error=JobError("ENGINE_CRASHED", text, {"signal": "SIGKILL"}))
    last = await anext(watch)
    assert (last.sequence, last.job.error.message) == (3, text)
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_watcher_that_leaves_disturbs_no_other(quantizer: Quantizer, board: FakeJobBoard) -> None:
    job = await quantizer.create(quantizer.place.spec())
    leaving = quantizer.jobs.WatchQuantizationJob(quantizer_service_pb2.WatchQuantizationJobRequest(job_id=job.job_id))
    await leaving.read()
    staying = asyncio.create_task(quantizer.history(job.job_id))
    leaving.cancel()
    board.set_state(job.job_id, JobState.CANCELLED)
    assert len(await staying) == 2


async def test_artifacts_outside_the_root_and_half_written_ones_are_refused(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    """No manifest, no artifact."""
    half = quantizer.place.artifacts / "artifacts" / "tiny" / ("0" * 64)
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    cases = [
        ("", grpc.StatusCode.INVALID_ARGUMENT),
        ("nonsense", grpc.StatusCode.INVALID_ARGUMENT),
        (tmp_path.as_uri(), grpc.StatusCode.PERMISSION_DENIED),
        (half.as_uri(), grpc.StatusCode.NOT_FOUND),
    ]
    for uri, code in cases:
        for method, request in (
            (quantizer.artifacts.GetArtifact, artifact_service_pb2.GetArtifactRequest(uri=uri)),
            (quantizer.artifacts.VerifyArtifact, artifact_service_pb2.VerifyArtifactRequest(uri=uri)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await method(request)
            assert failure.value.code() == code
    listed = await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest())
    assert list(listed.artifacts) == []


async def test_artifacts_are_listed_by_name_and_digest_page_by_page(quantizer: Quantizer) -> None:
    """Without their files; a token is good for the same name only."""
    root = quantizer.place.artifacts.as_uri()
    store = Stores([root]).open(root, "root")
    for name in ("beta", "alpha"):
        for number in range(3):
            publish_manifest(store, make_manifest(name=name, files=[ArtifactFile("config.json", number, "0" * 64)]))

    async def page(name: str, token: str) -> artifact_service_pb2.ListArtifactsResponse:
        request = artifact_service_pb2.ListArtifactsRequest(name=name, page_size=4, page_token=token)
        return await quantizer.artifacts.ListArtifacts(request)

    first = await page("", "")
    second = await page("", first.next_page_token)
    listed = [(artifact.name, artifact.digest) for artifact in (*first.artifacts, *second.artifacts)]
    assert (len(first.artifacts), len(listed), second.next_page_token) == (4, 6, "")
    assert listed == sorted(listed)
    assert not any(artifact.files for artifact in first.artifacts)
    assert [artifact.name for artifact in (await page("beta", "")).artifacts] == ["beta"] * 3
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await page("beta", first.next_page_token)
    assert details(failure.value)[1].field_violations[0].field == "page_token"


@pytest.mark.parametrize("name", ["../x", "a/b", "a\0", "a\nb", "..", "x" * 300, "É"])
async def test_no_artifact_can_have_a_name_that_breaks_the_rule(quantizer: Quantizer, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest(name=name))
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details(failure.value)[1].field_violations
    assert (violation.field, violation.reason) == ("name", "INVALID_NAME")


@pytest.mark.parametrize("time_ms", [-(2**62), 10**17, 2**70])
async def test_a_token_of_no_time_is_refused(quantizer: Quantizer, time_ms: int) -> None:
    """A made-up one of the right form."""
    request = quantizer_service_pb2.ListQuantizationJobsRequest(page_token=make_token("", [time_ms, 0, "job-0"]))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.jobs.ListQuantizationJobs(request)
    [violation] = details(failure.value)[1].field_violations
    assert (violation.field, violation.reason) == ("page_token", "INVALID_PAGE_TOKEN")


@pytest.mark.parametrize("field", ["hidden_size", "head_dim", "num_experts"])
@pytest.mark.parametrize("value", ["x", [], {}, [64], -1, 0, True, 1.5, 10**40, float("inf"), float("nan")])
async def test_a_size_that_is_none_is_a_fault_of_the_config(quantizer: Quantizer, field: str, value: object) -> None:
    path = quantizer.place.source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    error = await refusal(quantizer, quantizer.place.spec())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)[0].reason == "CONFIG_INVALID"
    assert field in error.details()


async def test_a_name_of_absurd_length_is_answered_in_part(quantizer: Quantizer) -> None:
    """A call that cannot be answered at all would tell nobody what is wrong."""
    path = quantizer.place.source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["X" * (5 << 20)]}))
    plan = await quantizer.jobs.PlanQuantization(
        quantizer_service_pb2.PlanQuantizationRequest(spec=quantizer.place.spec())
    )
    assert [problem.reason for problem in plan.problems] == ["UNSUPPORTED_ARCHITECTURE"]
    assert plan.ByteSize() < 20_000


async def test_a_header_of_absurd_widths_is_answered(quantizer: Quantizer) -> None:
    """A tensor without elements may have any width; what it would take is more than any server has."""
    name = "model.layers.0.self_attn.q_proj.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode()
    (quantizer.place.source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    error = await refusal(quantizer, quantizer.place.spec())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    plan = await quantizer.jobs.PlanQuantization(
        quantizer_service_pb2.PlanQuantizationRequest(spec=quantizer.place.spec())
    )
    assert "NOT_ENOUGH_MEMORY" in {problem.reason for problem in plan.problems}


async def test_verify_names_every_file_that_differs(quantizer: Quantizer) -> None:
    root = quantizer.place.artifacts.as_uri()
    uri = publish_manifest(
        Stores([root]).open(root, "root"),
        make_manifest(files=[ArtifactFile("config.json", 2, "0" * 64), ArtifactFile("model.safetensors", 1, "1" * 64)]),
    )
    store = Stores([root]).open(uri, "uri")
    store.write("config.json", b"{}")
    response = await quantizer.artifacts.VerifyArtifact(artifact_service_pb2.VerifyArtifactRequest(uri=uri))
    assert not response.intact
    assert [(fault.path, fault.kind) for fault in response.faults] == [
        ("config.json", artifact_service_pb2.FILE_FAULT_KIND_DIGEST_MISMATCH),
        ("model.safetensors", artifact_service_pb2.FILE_FAULT_KIND_MISSING),
    ]
    assert response.verified_bytes == 2
