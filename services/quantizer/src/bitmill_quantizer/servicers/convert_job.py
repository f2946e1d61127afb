"""Between the protos of jobs and plans and the domain."""

from __future__ import annotations

from collections.abc import Iterable

from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_common.structs import struct_values
from bitmill_quantizer.jobs.job import Job, JobError, JobEvent, JobPhase, JobState, Progress
from bitmill_quantizer.plans.planner import Plan
from bitmill_quantizer.recipes.drafts import SpecDraft
from bitmill_quantizer.recipes.specs import QuantizationSpec
from bitmill_quantizer.servicers.convert_artifact import device_protos, duration, timestamp
from bitmill_quantizer.servicers.convert_recipe import (
    SCHEMES,
    calibration_draft,
    calibration_proto,
    recipe_draft,
    recipe_proto,
)

STATES: dict[JobState, quantization_job_pb2.JobState] = {
    state: getattr(quantization_job_pb2, f"JOB_STATE_{state.value}") for state in JobState
}
MAX_TEXT_CHARACTERS = 4000
"""Of a plan's texts: a checkpoint may call its architecture what it will, and an answer must reach every client."""

PHASES: dict[JobPhase, quantization_job_pb2.JobPhase] = {
    phase: getattr(quantization_job_pb2, f"JOB_PHASE_{phase.value}") for phase in JobPhase
}
_STATE_OF = {number: state for state, number in STATES.items()}


def draft_of(spec: quantization_job_pb2.QuantizationSpec) -> SpecDraft:
    """Takes a spec as it came, unchecked."""
    options = struct_values(spec.engine_options, "spec.engine_options") if spec.HasField("engine_options") else None
    return SpecDraft(
        source_uri=spec.source_uri,
        artifact_name=spec.artifact_name,
        recipe=recipe_draft(spec.recipe),
        calibration=calibration_draft(spec.calibration),
        evaluation_tokens=spec.evaluation.num_tokens if spec.evaluation.HasField("num_tokens") else None,
        engine_options=options,
        engine=spec.engine,
    )


def states_of(numbers: Iterable[quantization_job_pb2.JobState]) -> list[JobState]:
    """Takes the states of a filter. `InvalidArgumentError` for the unspecified and for unknown ones."""
    given = list(numbers)
    violations = [
        FieldViolation(f"states[{index}]", f"{number} is no state of a job", "UNKNOWN_STATE")
        for index, number in enumerate(given)
        if number not in _STATE_OF
    ]
    if violations:
        raise InvalidArgumentError(violations)
    return [_STATE_OF[number] for number in given]


def job_proto(job: Job) -> quantization_job_pb2.QuantizationJob:
    """Builds a job."""
    return quantization_job_pb2.QuantizationJob(
        job_id=job.job_id,
        spec=spec_proto(job.spec),
        state=STATES[job.state],
        phase=PHASES[job.phase] if job.phase else quantization_job_pb2.JOB_PHASE_UNSPECIFIED,
        progress=_progress_proto(job.progress) if job.progress else None,
        error=_error_proto(job.error) if job.error else None,
        artifact_uri=job.artifact_uri,
        create_time=timestamp(job.create_time),
        start_time=timestamp(job.start_time),
        end_time=timestamp(job.end_time),
    )


def event_proto(event: JobEvent) -> quantization_job_pb2.JobEvent:
    """Builds an event."""
    return quantization_job_pb2.JobEvent(sequence=event.sequence, time=timestamp(event.time), job=job_proto(event.job))


def spec_proto(spec: QuantizationSpec) -> quantization_job_pb2.QuantizationSpec:
    """Builds a spec that is accepted as it is."""
    return quantization_job_pb2.QuantizationSpec(
        source_uri=spec.source_uri,
        artifact_name=spec.artifact_name,
        recipe=recipe_proto(spec.recipe),
        calibration=calibration_proto(spec.calibration),
        evaluation=quantization_job_pb2.EvaluationSpec(num_tokens=spec.evaluation_tokens),
        engine_options=spec.engine_options,
        engine=spec.engine,
    )


def plan_proto(
    plan: Plan, asked: quantization_job_pb2.QuantizationSpec
) -> quantizer_service_pb2.PlanQuantizationResponse:
    """Builds the answer to a dry run; the spec as it was asked for when it has no defaults to fill in."""
    checkpoint, estimate = plan.checkpoint, plan.estimate
    return quantizer_service_pb2.PlanQuantizationResponse(
        problems=[
            quantizer_service_pb2.Problem(field=p.field, reason=p.reason, description=_cut(p.description))
            for p in plan.problems
        ],
        spec=spec_proto(plan.spec) if plan.spec else asked,
        architecture=_cut(checkpoint.architecture) if checkpoint else "",
        num_parameters=checkpoint.num_parameters if checkpoint else 0,
        source_size_bytes=checkpoint.size_bytes if checkpoint else 0,
        num_quantized_parameters=estimate.num_quantized_parameters if estimate else 0,
        num_quantized_modules=estimate.num_quantized_modules if estimate else 0,
        estimated_artifact_size_bytes=estimate.artifact_size_bytes if estimate else 0,
        estimated_host_memory_bytes=estimate.host_memory_bytes if estimate else 0,
        estimated_disk_bytes=plan.disk_bytes,
        devices=device_protos(plan.devices),
        estimated_device_memory_bytes=estimate.device_memory_bytes if estimate else 0,
        estimated_duration=duration(plan.duration.seconds) if plan.duration else None,
        estimated_duration_basis=plan.duration.basis if plan.duration else "",
        scheme_sizes=[
            quantizer_service_pb2.SchemeSize(
                scheme=SCHEMES[each.scheme],
                artifact_size_bytes=each.artifact_size_bytes,
                devices=device_protos(each.devices),
            )
            for each in plan.scheme_sizes
        ],
        skipped_modules=plan.skipped_modules,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"


def _progress_proto(progress: Progress) -> quantization_job_pb2.JobProgress:
    return quantization_job_pb2.JobProgress(
        completed=progress.completed, total=progress.total, unit=progress.unit, loss=progress.loss
    )


def _error_proto(error: JobError) -> quantization_job_pb2.JobError:
    return quantization_job_pb2.JobError(reason=error.reason, message=error.message, metadata=error.metadata)
