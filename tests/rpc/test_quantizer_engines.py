"""Jobs that name their engine, and specs that the engine they name cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.artifact.v1 import artifact_service_pb2, recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from support.checkpoints import write_checkpoint
from support.fake_job_board import FakeJobBoard
from support.quantizing import Place, Quantizer, details, running, serving

Spec = quantization_job_pb2.QuantizationSpec


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
async def quantizer(place: Place) -> AsyncIterator[Quantizer]:
    async with serving(place, FakeJobBoard(), place.workshop()) as quantizer:
        yield quantizer


def spec_for(place: Place, engine: str, **recipe: object) -> Spec:
    spec = place.spec(**recipe)
    spec.engine = engine
    return spec


async def refusal(quantizer: Quantizer, spec: Spec) -> tuple[grpc.StatusCode, set[tuple[str, str]]]:
    """How Create fails: the code, and field and reason of each fault; Plan tells the same."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await quantizer.create(spec)
    info, bad_request = details(failure.value)
    faults = {(each.field, each.reason) for each in bad_request.field_violations} or {("", info.reason)}
    plan = await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))
    assert faults <= {(problem.field, problem.reason) for problem in plan.problems}
    return failure.value.code(), faults


@pytest.mark.parametrize("engine", ["llmcompressor", "gptqmodel", "auto_gptq"])
async def test_a_job_is_done_by_the_engine_that_it_names(place: Place, engine: str) -> None:
    """The artifact says which it was."""
    place.host.cuda = True
    async with running(place) as quantizer:
        created = await quantizer.create(spec_for(place, engine))
        assert created.spec.engine == engine
        job = await quantizer.finished(created.job_id)
        answer = await quantizer.artifacts.GetArtifact(artifact_service_pb2.GetArtifactRequest(uri=job.artifact_uri))
    assert answer.artifact.engine == engine


async def test_the_default_engine_is_llm_compressor(quantizer: Quantizer) -> None:
    assert (await quantizer.create(quantizer.place.spec())).spec.engine == "llmcompressor"


async def test_an_engine_that_there_is_not_is_an_invalid_argument(quantizer: Quantizer) -> None:
    code, faults = await refusal(quantizer, spec_for(quantizer.place, "gptq"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert faults == {("spec.engine", "UNKNOWN_ENGINE")}


async def test_an_engine_that_is_not_installed_is_a_failed_precondition(quantizer: Quantizer) -> None:
    quantizer.place.engine_python.unlink()
    code, faults = await refusal(quantizer, spec_for(quantizer.place, "gptqmodel"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert faults == {("", "ENGINE_NOT_INSTALLED")}


async def test_auto_gptq_needs_a_gpu(quantizer: Quantizer) -> None:
    """Said at Create, before any file is fetched; the other engines need none."""
    code, faults = await refusal(quantizer, spec_for(quantizer.place, "auto_gptq"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert faults == {("", "DEVICE_MISSING")}
    quantizer.place.host.cuda = True
    assert (await quantizer.create(spec_for(quantizer.place, "auto_gptq"))).spec.engine == "auto_gptq"


async def test_what_of_a_recipe_an_engine_does_not_do_is_an_invalid_argument(quantizer: Quantizer) -> None:
    """Every field at once."""
    spec = spec_for(
        quantizer.place,
        "gptqmodel",
        symmetric=False,
        kv_cache=recipe_pb2.KV_CACHE_SCHEME_FP8,
        rules=[recipe_pb2.ModuleRule(pattern="re:.*down_proj", scheme=recipe_pb2.SCHEME_FP8_DYNAMIC)],
    )
    code, faults = await refusal(quantizer, spec)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert faults == {
        ("spec.recipe.symmetric", "UNSUPPORTED_BY_ENGINE"),
        ("spec.recipe.kv_cache", "UNSUPPORTED_BY_ENGINE"),
        ("spec.recipe.rules[0].scheme", "UNSUPPORTED_BY_ENGINE"),
    }


async def test_a_checkpoint_that_an_engine_does_not_do_is_an_invalid_argument(quantizer: Quantizer) -> None:
    """llm-compressor does it."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    source = write_checkpoint(quantizer.place.sources / "qwen3", config=config)
    quantizer.place.host.cuda = True
    spec = spec_for(quantizer.place, "auto_gptq")
    spec.source_uri = source.as_uri()
    code, faults = await refusal(quantizer, spec)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert faults == {("spec.engine", "UNSUPPORTED_BY_ENGINE")}
    spec.engine = "llmcompressor"
    assert (await quantizer.create(spec)).spec.engine == "llmcompressor"
