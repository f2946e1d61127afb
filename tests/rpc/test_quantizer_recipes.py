"""Recipes over RPC: taken with every option, handed to the engine, and told again by the artifact."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.artifact.v1 import artifact_pb2, artifact_service_pb2, recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from bitmill_common.artifact import COMPRESSED_TENSORS
from support import fake_quantization_engine as fake_engine
from support.fake_job_board import FakeJobBoard
from support.quantizing import Place, Quantizer, details, running, serving

W4A16, W8A16, UNQUANTIZED = recipe_pb2.SCHEME_W4A16, recipe_pb2.SCHEME_W8A16, recipe_pb2.SCHEME_UNQUANTIZED
QKV = r"re:.*self_attn\.(q|k|v)_proj"

RULES = recipe_pb2.Recipe(
    scheme=W4A16,
    group_size=64,
    symmetric=False,
    ignore=["re:.*o_proj"],
    dampening_frac=0.1,
    seed=3,
    algorithm=recipe_pb2.ALGORITHM_AWQ,
    activation_order=recipe_pb2.ACTIVATION_ORDER_NONE,
    rules=[
        recipe_pb2.ModuleRule(pattern=QKV, scheme=recipe_pb2.SCHEME_FP8_DYNAMIC),
        recipe_pb2.ModuleRule(pattern="re:.*down_proj", scheme=W8A16, group_size=32),
    ],
    kv_cache=recipe_pb2.KV_CACHE_SCHEME_FP8,
)
SMOOTHED = recipe_pb2.Recipe(scheme=recipe_pb2.SCHEME_W8A8_INT8, smoothing_strength=0.5)
SEARCH = recipe_pb2.Recipe(
    scheme=recipe_pb2.SCHEME_ADAPTIVE,
    adaptive=recipe_pb2.AdaptiveSearch(
        candidates=[
            recipe_pb2.AdaptiveCandidate(scheme=recipe_pb2.SCHEME_MXFP4A16),
            recipe_pb2.AdaptiveCandidate(scheme=W8A16, group_size=-1),
        ],
        max_perplexity_ratio=1.5,
        num_samples=2,
    ),
)
QKV_FP8 = recipe_pb2.Recipe(
    scheme=UNQUANTIZED, rules=[recipe_pb2.ModuleRule(pattern=QKV, scheme=recipe_pb2.SCHEME_FP8_DYNAMIC)]
)
PASS_THROUGH = recipe_pb2.Recipe(scheme=UNQUANTIZED)


@pytest.fixture
async def quantizer(tmp_path: Path) -> AsyncIterator[Quantizer]:
    async with running(Place(tmp_path)) as quantizer:
        yield quantizer


@pytest.fixture
async def planning(tmp_path: Path) -> AsyncIterator[Quantizer]:
    """Whose jobs nobody works on."""
    place = Place(tmp_path)
    async with serving(place, FakeJobBoard(), place.workshop()) as quantizer:
        yield quantizer


def spec_of(quantizer: Quantizer, recipe: recipe_pb2.Recipe) -> quantization_job_pb2.QuantizationSpec:
    spec = quantizer.place.spec()
    spec.recipe.CopyFrom(recipe)
    spec.calibration.packing = recipe_pb2.PACKING_TRUNCATE
    return spec


async def artifact_of(quantizer: Quantizer, recipe: recipe_pb2.Recipe) -> artifact_pb2.Artifact:
    done = await quantizer.finished((await quantizer.create(spec_of(quantizer, recipe))).job_id)
    assert done.state == quantization_job_pb2.JOB_STATE_SUCCEEDED, done.error
    request = artifact_service_pb2.GetArtifactRequest(uri=done.artifact_uri)
    return (await quantizer.artifacts.GetArtifact(request)).artifact


@pytest.mark.parametrize("recipe", [RULES, SMOOTHED, SEARCH, QKV_FP8, PASS_THROUGH])
async def test_a_spec_comes_back_complete_and_is_accepted_as_it_is(
    planning: Quantizer, recipe: recipe_pb2.Recipe
) -> None:
    """Nothing that was given is lost, and what was filled in is what its scheme takes."""
    asked = spec_of(planning, recipe)
    plan = await planning.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=asked))
    assert list(plan.problems) == []
    for field, value in recipe.ListFields():
        if field.name not in ("rules", "adaptive"):
            assert getattr(plan.spec.recipe, field.name) == value
    assert [rule.pattern for rule in plan.spec.recipe.rules] == [rule.pattern for rule in recipe.rules]
    assert plan.spec.recipe.adaptive == recipe.adaptive
    again = await planning.jobs.PlanQuantization(quantizer_service_pb2.PlanQuantizationRequest(spec=plan.spec))
    assert list(again.problems) == []
    assert again.spec == plan.spec


async def test_the_engine_gets_the_recipe_with_every_default_filled_in(quantizer: Quantizer) -> None:
    """In the names of its protocol; the request's file lies in the job's directory while it runs."""
    fake_engine.behave(quantizer.place.engine, quantize="hang")
    job = await quantizer.create(spec_of(quantizer, RULES))
    await quantizer.reaches(job.job_id, quantization_job_pb2.JOB_PHASE_QUANTIZE, completed=1)
    request = json.loads((quantizer.place.work / "jobs" / job.job_id / "quantize.json").read_text())
    await quantizer.cancel(job.job_id)
    assert request["recipe"] == {
        "scheme": "W4A16",
        "algorithm": "AWQ",
        "group_size": 64,
        "symmetric": False,
        "activation_order": "NONE",
        "ignore": ["re:.*o_proj"],
        "rules": [
            {"pattern": QKV, "scheme": "FP8_DYNAMIC", "algorithm": "RTN", "group_size": 0, "symmetric": True},
            {
                "pattern": "re:.*down_proj",
                "scheme": "W8A16",
                "algorithm": "GPTQ",
                "group_size": 32,
                "symmetric": True,
            },
        ],
        "kv_cache": "FP8",
        "smoothing_strength": 0.0,
        "dampening_frac": 0.1,
        "seed": 3,
        "adaptive": None,
    }
    assert request["calibration"] == {
        "path": None,
        "packing": "TRUNCATE",
        "num_samples": 4,
        "max_sequence_length": 32,
    }


async def test_an_artifact_tells_what_was_measured_of_it(quantizer: Quantizer) -> None:
    """What became of each layer, what ADAPTIVE saw, what calibration used, and what each phase took."""
    artifact = await artifact_of(quantizer, SEARCH)
    assert artifact.format == COMPRESSED_TENSORS
    [module] = artifact.modules
    assert (module.scheme, module.loss, module.dampening_frac) == (recipe_pb2.SCHEME_MXFP4A16, 0.5, 0.1)
    assert module.remark == "its Hessian did not invert"
    assert [sensitivity.candidate for sensitivity in artifact.sensitivities] == list(SEARCH.adaptive.candidates)
    assert [sensitivity.chosen for sensitivity in artifact.sensitivities] == [True, False]
    assert artifact.calibration_use.num_documents == 2
    assert artifact.evaluation.top1_agreement == 0.9
    assert [loss.layer for loss in artifact.evaluation.layer_losses] == ["model.layers.0"]
    costs = {cost.phase: cost for cost in artifact.phase_costs}
    assert list(costs) == ["RESOLVE", "FETCH", "PREFLIGHT", "QUANTIZE", "EVALUATE", "SAVE", "VERIFY", "UPLOAD"]
    assert all(cost.duration.ToMicroseconds() > 0 for cost in costs.values())
    assert (costs["QUANTIZE"].peak_memory_bytes, costs["QUANTIZE"].peak_device_memory_bytes) == (1_000_000, 2_000_000)
    assert costs["EVALUATE"].peak_memory_bytes == 3_000_000
    listed = (await quantizer.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest())).artifacts[0]
    assert not any((listed.modules, listed.sensitivities, listed.phase_costs, listed.evaluation.layer_losses))
    assert listed.evaluation.artifact_perplexity == 10.5


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        (SEARCH, [(artifact_pb2.DEVICE_CUDA, 80)]),
        (QKV_FP8, [(artifact_pb2.DEVICE_CPU, 0), (artifact_pb2.DEVICE_CUDA, 75)]),
        (PASS_THROUGH, [(artifact_pb2.DEVICE_CPU, 0), (artifact_pb2.DEVICE_CUDA, 75)]),
        (RULES, [(artifact_pb2.DEVICE_CUDA, 80)]),
    ],
)
async def test_an_artifact_needs_what_the_schemes_of_its_layers_need(
    quantizer: Quantizer, recipe: recipe_pb2.Recipe, devices: list[tuple[artifact_pb2.Device, int]]
) -> None:
    """Those that the engine really used; an FP8 cache counts too."""
    artifact = await artifact_of(quantizer, recipe)
    assert [(support.device, support.min_compute_capability) for support in artifact.devices] == devices


async def test_a_recipe_that_does_not_fit_the_model_names_every_field(planning: Quantizer) -> None:
    recipe = recipe_pb2.Recipe(
        scheme=W4A16,
        group_size=128,
        rules=[
            recipe_pb2.ModuleRule(pattern="re:.*down_proj", scheme=recipe_pb2.SCHEME_FP8_BLOCK),
            recipe_pb2.ModuleRule(pattern="re:.*q_proj", scheme=W8A16),
            recipe_pb2.ModuleRule(pattern="re:.*layers.0.*q_proj", scheme=W8A16),
            recipe_pb2.ModuleRule(pattern="re:nothing", scheme=W8A16),
        ],
    )
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await planning.create(spec_of(planning, recipe))
    violations = details(failure.value)[1].field_violations
    assert [(violation.field.removeprefix("spec.recipe."), violation.reason) for violation in violations] == [
        ("rules[2].pattern", "PATTERN_MATCHES_NOTHING"),
        ("rules[3].pattern", "PATTERN_MATCHES_NOTHING"),
        ("rules[1].pattern", "SPLITS_FUSED_LAYERS"),
        ("group_size", "GROUP_SIZE_DOES_NOT_DIVIDE"),
    ]


async def test_plan_sizes_every_scheme_and_names_what_no_kernel_takes(planning: Quantizer) -> None:
    """The down projections have 64 output channels, half a block of FP8."""
    request = quantizer_service_pb2.PlanQuantizationRequest(spec=spec_of(planning, PASS_THROUGH))
    plan = await planning.jobs.PlanQuantization(request)
    sizes = {size.scheme: size for size in plan.scheme_sizes}
    assert set(sizes) == set(recipe_pb2.Scheme.values()) - {
        recipe_pb2.SCHEME_UNSPECIFIED,
        recipe_pb2.SCHEME_ADAPTIVE,
    }
    assert sizes[UNQUANTIZED].artifact_size_bytes == plan.estimated_artifact_size_bytes
    assert sizes[W4A16].artifact_size_bytes < sizes[UNQUANTIZED].artifact_size_bytes
    assert [device.device for device in sizes[W8A16].devices] == [artifact_pb2.DEVICE_CUDA]
    request.spec.recipe.CopyFrom(recipe_pb2.Recipe(scheme=recipe_pb2.SCHEME_FP8_BLOCK))
    skipped = (await planning.jobs.PlanQuantization(request)).skipped_modules
    assert "model.layers.0.self_attn.q_proj" in skipped
    assert "model.layers.0.mlp.down_proj" not in skipped
