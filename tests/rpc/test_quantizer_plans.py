"""What PlanQuantization tells of a job before it runs: from headers alone, and from what this server did before."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bitmill.artifact.v1 import recipe_pb2
from bitmill.quantizer.v1 import quantizer_service_pb2
from bitmill.quantizer.v1.quantization_job_pb2 import JOB_STATE_SUCCEEDED, QuantizationSpec
from bitmill_quantizer.plans import preflight
from support.checkpoints import write_checkpoint
from support.fake_job_board import FakeJobBoard
from support.quantizing import Place, Quantizer, running, serving

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
async def quantizer(place: Place) -> AsyncIterator[Quantizer]:
    async with serving(place, FakeJobBoard(), place.workshop()) as quantizer:
        yield quantizer


async def plan_of(quantizer: Quantizer, spec: QuantizationSpec) -> quantizer_service_pb2.PlanQuantizationResponse:
    return await quantizer.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=spec))


@pytest.fixture
def spec_of_8b(place: Place) -> QuantizationSpec:
    """Of a checkpoint whose weights are holes in its files: reading them would take 16 GB."""
    source = write_checkpoint(place.sources / "8b", num_shards=4, seed=None, **LLAMA_3_8B)
    spec = place.spec(group_size=128)
    spec.source_uri = source.as_uri()
    spec.calibration.num_samples, spec.calibration.max_sequence_length = 512, 2048
    return spec


async def test_a_checkpoint_of_8b_is_planned_from_its_headers(
    quantizer: Quantizer, spec_of_8b: QuantizationSpec
) -> None:
    """Sizes by hand: 7 billion weights in 4.125 bits, embeddings and head in 16."""
    plan = await plan_of(quantizer, spec_of_8b)
    assert list(plan.problems) == []
    assert (plan.num_parameters, plan.num_quantized_modules) == (8_030_261_248, 224)
    embeddings = 2 * 128256 * 4096
    assert plan.num_quantized_parameters == 8_030_261_248 - embeddings - 65 * 4096
    expected = plan.num_quantized_parameters * (4 + 16 / 128) / 8 + 2 * (embeddings + 65 * 4096)
    assert math.isclose(plan.estimated_artifact_size_bytes, expected, rel_tol=1e-3)
    assert plan.source_size_bytes > 16_000_000_000
    kept = 2 * 512 * 2048 * 4096 * 2
    assert plan.estimated_host_memory_bytes > 2 * plan.source_size_bytes + kept
    assert plan.estimated_duration.seconds > 3600
    assert "reference" in plan.estimated_duration_basis
    assert len(plan.scheme_sizes) == 9


async def test_a_gpu_is_planned_for_where_there_is_one(
    place: Place, quantizer: Quantizer, spec_of_8b: QuantizationSpec
) -> None:
    """23 GiB were measured for quantizing; both models lie on the GPU while they are compared."""
    assert (await plan_of(quantizer, spec_of_8b)).estimated_device_memory_bytes == 0
    place.host.cuda, place.host.total_device_memory_bytes = True, 140 << 30
    plan = await plan_of(quantizer, spec_of_8b)
    assert list(plan.problems) == []
    assert 32_000_000_000 < plan.estimated_device_memory_bytes < 42_000_000_000
    assert plan.estimated_duration.seconds == pytest.approx(147, abs=5)
    assert "H200" in plan.estimated_duration_basis
    place.host.total_device_memory_bytes = 24 << 30
    [problem] = (await plan_of(quantizer, spec_of_8b)).problems
    assert (problem.reason, "GPU" in problem.description) == ("NOT_ENOUGH_MEMORY", True)


async def test_a_budget_that_nothing_fits_names_the_least_that_does(
    quantizer: Quantizer, spec_of_8b: QuantizationSpec
) -> None:
    search = recipe_pb2.AdaptiveSearch(max_size_bytes=2_000_000_000)
    spec_of_8b.recipe.CopyFrom(recipe_pb2.Recipe(scheme=recipe_pb2.SCHEME_ADAPTIVE, adaptive=search))
    [problem] = (await plan_of(quantizer, spec_of_8b)).problems
    assert (problem.field, problem.reason) == ("spec.recipe.adaptive.max_size_bytes", "BUDGET_TOO_SMALL")
    least = int(problem.description.partition("less than the ")[2].split()[0])
    spec_of_8b.recipe.adaptive.max_size_bytes = least
    assert list((await plan_of(quantizer, spec_of_8b)).problems) == []


async def test_the_time_is_based_on_jobs_of_this_kind_once_there_are_some(place: Place) -> None:
    """The reference says minutes for a real engine; the fake one takes a second."""
    async with running(place) as quantizer:
        before = await plan_of(quantizer, place.spec())
        assert "reference" in before.estimated_duration_basis
        job = await quantizer.finished((await quantizer.create(place.spec())).job_id)
        assert job.state == JOB_STATE_SUCCEEDED
        after = await plan_of(quantizer, place.spec())
        assert job.job_id in after.estimated_duration_basis
        assert after.estimated_duration.ToMicroseconds() < before.estimated_duration.ToMicroseconds()
        other = await plan_of(quantizer, place.spec(algorithm=recipe_pb2.ALGORITHM_RTN))
        assert "reference" in other.estimated_duration_basis


async def test_samples_of_absurd_length_are_a_problem_among_others(
    quantizer: Quantizer, spec_of_8b: QuantizationSpec
) -> None:
    """What they would take is more than a duration holds."""
    spec_of_8b.calibration.num_samples, spec_of_8b.calibration.max_sequence_length = 4096, 2**32 - 1
    plan = await plan_of(quantizer, spec_of_8b)
    assert {problem.reason for problem in plan.problems} == {"EXCEEDS_CONTEXT_LENGTH", "NOT_ENOUGH_MEMORY"}
    assert plan.estimated_duration.seconds == 315_576_000_000


async def test_what_the_engine_would_refuse_of_a_recipe_is_a_problem(
    place: Place, quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for SmoothQuant to scale; and patterns that nobody waits for, which are not even tried."""
    spec = place.spec()
    ignore = [r"re:.*\.(q|k|v)_proj", r"re:.*\.(gate|up)_proj"]
    spec.recipe.CopyFrom(recipe_pb2.Recipe(scheme=recipe_pb2.SCHEME_W8A8_INT8, ignore=ignore))
    [problem] = (await plan_of(quantizer, spec)).problems
    assert (problem.field, problem.reason) == ("spec.recipe.smoothing_strength", "UNSUPPORTED_SMOOTHING")
    spec.recipe.smoothing_strength = 0
    assert list((await plan_of(quantizer, spec)).problems) == []
    monkeypatch.setattr(preflight, "MAX_MATCHING_STEPS", 100)
    [problem] = (await plan_of(quantizer, spec)).problems
    assert (problem.field, problem.reason) == ("spec.recipe.ignore", "PATTERNS_TOO_SLOW")
