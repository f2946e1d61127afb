"""How long a job is expected to take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bitmill_common.artifact import Device
from bitmill_common.recipes import (
    AdaptiveSearch,
    Algorithm,
    Calibration,
    KvCacheScheme,
    ModuleRule,
    Recipe,
    Scheme,
    Treatment,
)
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.plans.durations import (
    FinishedWork,
    PhaseWork,
    Rates,
    Reference,
    estimate_duration,
    method_of,
    works_of,
)
from bitmill_quantizer.plans.reference_rates import REFERENCES
from bitmill_quantizer.recipes.specs import QuantizationSpec

GPTQ = PhaseWork(JobPhase.QUANTIZE, "GPTQ by llmcompressor on cpu", parameters=1000, tokens=10)
SAVE = PhaseWork(JobPhase.SAVE, "", num_bytes=500)
REFERENCE = Reference(
    "a tin box",
    {
        (JobPhase.QUANTIZE, GPTQ.kind): Rates(start_s=5, parameter_s=0.001, parameter_token_s=0.01),
        (JobPhase.SAVE, ""): Rates(byte_s=0.01),
    },
)
W4A16 = Recipe(Scheme.W4A16, 128)
SPEC = QuantizationSpec("file:///models/x", "x", W4A16, Calibration(num_samples=8, max_sequence_length=64), 4096)


def nothing(phase: JobPhase, kind: str, limit: int) -> Sequence[FinishedWork]:
    return ()


def test_without_finished_jobs_the_reference_is_scaled_and_named() -> None:
    found = estimate_duration([GPTQ, SAVE], REFERENCE, nothing)
    assert found is not None
    assert found.seconds == pytest.approx(5 + 1 + 100 + 5)
    assert "a tin box" in found.basis


def test_finished_jobs_of_the_same_kind_correct_the_reference() -> None:
    """The median of what they took beside what the reference says of them; the last is named."""

    def recall(phase: JobPhase, kind: str, limit: int) -> Sequence[FinishedWork]:
        if (phase, kind) != (GPTQ.phase, GPTQ.kind):
            return ()
        half = PhaseWork(phase, kind, parameters=500, tokens=10)  # 55.5 s of the reference
        return [FinishedWork("job-3", half, 111), FinishedWork("job-2", half, 55.5), FinishedWork("job-1", GPTQ, 5300)]

    found = estimate_duration([GPTQ, SAVE], REFERENCE, recall)
    assert found is not None
    assert found.seconds == pytest.approx(2 * 106 + 5)
    assert "3 jobs" in found.basis
    assert "job-3" in found.basis


def test_a_kind_without_a_reference_is_scaled_from_finished_jobs_alone() -> None:
    unknown = PhaseWork(JobPhase.QUANTIZE, "GPTQ by gptqmodel on cpu", parameters=1000, tokens=10)
    assert estimate_duration([unknown], REFERENCE, nothing) is None
    half = PhaseWork(unknown.phase, unknown.kind, parameters=500, tokens=10)
    found = estimate_duration([unknown], REFERENCE, lambda phase, kind, limit: [FinishedWork("job-1", half, 30)])
    assert found is not None
    assert found.seconds == pytest.approx(60)
    assert "1 job" in found.basis


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        (W4A16, "GPTQ"),
        (Recipe(Scheme.W4A16, 128, algorithm=Algorithm.AWQ), "AWQ"),
        (Recipe(Scheme.W4A16, 128, algorithm=Algorithm.RTN), "RTN"),
        (Recipe(Scheme.FP8_STATIC, 0, algorithm=Algorithm.RTN), "CALIBRATE"),
        (Recipe(Scheme.UNQUANTIZED, 0, algorithm=Algorithm.NONE), "RTN"),
        (Recipe(Scheme.UNQUANTIZED, 0, algorithm=Algorithm.NONE, kv_cache=KvCacheScheme.FP8), "CALIBRATE"),
        (
            Recipe(
                Scheme.FP8_DYNAMIC,
                0,
                algorithm=Algorithm.RTN,
                rules=(ModuleRule("x", Treatment(Scheme.W4A16, Algorithm.GPTQ, 128)),),
            ),
            "GPTQ",
        ),
        (Recipe(Scheme.ADAPTIVE, 0, algorithm=Algorithm.NONE, adaptive=AdaptiveSearch((), 1)), "ADAPTIVE"),
    ],
)
def test_the_slowest_of_what_a_recipe_does_is_its_method(recipe: Recipe, method: str) -> None:
    assert method_of(recipe) == method


def test_work_counts_tokens_only_where_data_is_read() -> None:
    works = {
        work.phase: work
        for work in works_of(SPEC, Device.CPU, "s3://b/x", parameters=7, source_bytes=3, artifact_bytes=2)
    }
    assert works[JobPhase.QUANTIZE] == PhaseWork(JobPhase.QUANTIZE, "GPTQ by llmcompressor on cpu", 7, 512)
    assert works[JobPhase.EVALUATE] == PhaseWork(JobPhase.EVALUATE, "llmcompressor on cpu", 7, 4096)
    assert (works[JobPhase.FETCH].kind, works[JobPhase.FETCH].num_bytes) == ("file", 3)


@pytest.mark.parametrize("device", Device)
def test_the_default_recipe_has_a_reference_on_every_device(device: Device) -> None:
    works = works_of(
        SPEC, device, "file:///a", parameters=135_000_000, source_bytes=270_000_000, artifact_bytes=110_000_000
    )
    found = estimate_duration(works, REFERENCES[device], nothing)
    assert found is not None
    assert found.seconds > 0
