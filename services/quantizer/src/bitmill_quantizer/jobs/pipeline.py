"""A job's way through its phases, each of which may be run again from its start at any time.

A phase removes what an earlier run of itself left, so a worker that died in it is followed by another without harm.
What a phase returns is recorded, and is all that later phases know of it besides the files in the job's directory.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from bitmill_common.artifact import DeviceSupport, Manifest
from bitmill_common.measurements import PhaseCost, Verification
from bitmill_common.recipes import Scheme
from bitmill_quantizer.jobs import fetching, publishing
from bitmill_quantizer.jobs.fetching import Fetched, Resolved
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.jobs.publishing import Published, Saved
from bitmill_quantizer.jobs.workshop import Workshop, require
from bitmill_quantizer.plans import estimates
from bitmill_quantizer.plans.durations import FinishedWork, works_of
from bitmill_quantizer.plans.layers import has_experts
from bitmill_quantizer.plans.problems import raise_for
from bitmill_quantizer.ports import EvaluateOutcome, JobControl, QuantizeOutcome, RunningJob, StepRunner
from bitmill_quantizer.recipes.schemes import devices_for, treatments_of

T = TypeVar("T")


@dataclass(frozen=True)
class Checked:
    """What preflight found. `head_size`: the width of an attention head, None where the config does not tell."""

    head_size: int | None
    num_parameters: int


@dataclass(frozen=True)
class Quantized:
    """The model directory that the engine wrote, and the devices that can serve it."""

    model_dir: Path
    outcome: QuantizeOutcome
    devices: tuple[DeviceSupport, ...]


@dataclass(frozen=True)
class Verified:
    """What the serving engine made of the model directory; None where there is no verifier."""

    verification: Verification | None


def run_phases(shop: Workshop, job: RunningJob, step: StepRunner) -> str:
    """Runs a job through all its phases and returns the artifact's URI."""
    costs: list[PhaseCost] = []

    def run(phase: JobPhase, result_type: type[T], work: Callable[[JobControl], T]) -> T:
        done = step(phase, result_type, work)
        costs.append(_cost(phase, done.duration_s, done.result))
        return done.result

    spec = job.spec
    resolved = run(JobPhase.RESOLVE, Resolved, lambda control: fetching.resolve(shop, job, control))
    fetched = run(JobPhase.FETCH, Fetched, lambda control: fetching.fetch(shop, job, resolved, control))
    checked = run(JobPhase.PREFLIGHT, Checked, lambda control: check(shop, job, control))
    quantized = run(JobPhase.QUANTIZE, Quantized, lambda control: quantize(shop, job, fetched, checked, control))
    model_dir = quantized.model_dir
    evaluated = run(
        JobPhase.EVALUATE, EvaluateOutcome, lambda control: evaluate(shop, job, fetched, quantized, control)
    )
    saved = run(
        JobPhase.SAVE, Saved, lambda control: publishing.save(model_dir, spec.recipe, quantized.outcome, control)
    )
    verified = run(JobPhase.VERIFY, Verified, lambda control: verify(shop, quantized, control))
    run(
        JobPhase.UPLOAD,
        Published,
        lambda control: publishing.upload(shop, spec.artifact_name, model_dir, saved, control),
    )
    manifest = compose_manifest(job, fetched, quantized, evaluated, saved, verified, tuple(costs))
    uri = run(JobPhase.PUBLISH, Published, lambda control: publishing.publish(shop, manifest, control)).uri
    shop.costs.record(_finished_works(shop, job, fetched, checked, saved, costs))
    return uri


def _finished_works(
    shop: Workshop, job: RunningJob, fetched: Fetched, checked: Checked, saved: Saved, costs: Sequence[PhaseCost]
) -> list[FinishedWork]:
    took = {cost.phase: cost.duration_s for cost in costs}
    works = works_of(
        job.spec,
        shop.planner.device,
        shop.artifact_root,
        parameters=checked.num_parameters,
        source_bytes=fetched.source_size_bytes,
        artifact_bytes=saved.size_bytes,
    )
    return [FinishedWork(job.job_id, work, took[work.phase.value]) for work in works]


def _cost(phase: JobPhase, duration_s: float, result: object) -> PhaseCost:
    match result:
        case Quantized(outcome=outcome) | (EvaluateOutcome() as outcome):
            return PhaseCost(phase.value, duration_s, outcome.peak_memory_bytes, outcome.peak_device_memory_bytes)
        case _:
            return PhaseCost(phase.value, duration_s)


def check(shop: Workshop, job: RunningJob, control: JobControl) -> Checked:
    """Plans the job once more, on the host that runs it, and raises what stands in its way."""
    control.check()
    plan = shop.planner.plan(job.spec)
    raise_for(plan.problems)
    if plan.checkpoint is None:
        raise AssertionError("a plan without problems has a checkpoint")
    return Checked(estimates.head_size(plan.checkpoint), plan.checkpoint.num_parameters)


def quantize(shop: Workshop, job: RunningJob, fetched: Fetched, checked: Checked, control: JobControl) -> Quantized:
    """Runs the engine into a fresh directory, since one that is dying may still write to the last."""
    for stale in job.directory.glob("model-*"):
        shutil.rmtree(stale, ignore_errors=True)
    job.directory.mkdir(parents=True, exist_ok=True)
    model_dir = job.directory / f"model-{secrets.token_hex(4)}"
    spec = job.spec
    outcome = shop.engines[spec.engine].quantize(
        require(fetched.source_dir),
        model_dir,
        spec.recipe,
        spec.calibration,
        fetched.calibration_path and require(fetched.calibration_path),
        control,
    )
    # What ADAPTIVE chose, and what was skipped, only the engine knows.
    schemes = {module.scheme for module in outcome.modules} or {each.scheme for each in treatments_of(spec.recipe)}
    experts = has_experts(module.name for module in outcome.modules if module.scheme is not Scheme.UNQUANTIZED)
    devices = devices_for(schemes, spec.recipe.kv_cache, checked.head_size, quantized_experts=experts)
    return Quantized(model_dir, outcome, devices)


def evaluate(
    shop: Workshop, job: RunningJob, fetched: Fetched, quantized: Quantized, control: JobControl
) -> EvaluateOutcome:
    """Compares the result with the source on held-out text."""
    return shop.engines[job.spec.engine].evaluate(
        require(fetched.source_dir),
        require(quantized.model_dir),
        job.spec.evaluation_tokens,
        job.spec.calibration.max_sequence_length,
        control,
    )


def verify(shop: Workshop, quantized: Quantized, control: JobControl) -> Verified:
    """Lets the serving engine load the result and generate with it; raises what it says when it does not."""
    if shop.verifier is None:
        return Verified(None)
    return Verified(shop.verifier.verify(require(quantized.model_dir), quantized.devices, control))


def compose_manifest(
    job: RunningJob,
    fetched: Fetched,
    quantized: Quantized,
    evaluated: EvaluateOutcome,
    saved: Saved,
    verified: Verified,
    costs: tuple[PhaseCost, ...],
) -> Manifest:
    """Puts together what all phases found."""
    spec, outcome = job.spec, quantized.outcome
    return Manifest(
        name=spec.artifact_name,
        digest=saved.digest,
        files=saved.files,
        source_uri=spec.source_uri,
        source_digest=fetched.source_digest,
        source_size_bytes=fetched.source_size_bytes,
        recipe=spec.recipe,
        calibration=spec.calibration,
        calibration_use=outcome.calibration_use,
        format=outcome.format,
        modules=outcome.modules,
        sensitivities=outcome.sensitivities,
        phase_costs=costs,
        verification=verified.verification,
        devices=quantized.devices,
        evaluation=evaluated.evaluation,
        engine=spec.engine,
        job_id=job.job_id,
        create_time=datetime.now(UTC),
        versions=outcome.versions,
        engine_options=spec.engine_options,
    )
