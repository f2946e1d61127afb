"""Between the protos of jobs and artifacts and the domain."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from bitmill.artifact.v1 import artifact_pb2, artifact_service_pb2, recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2, quantizer_service_pb2
from bitmill_common.artifact import Device, DeviceSupport, Manifest
from bitmill_common.artifacts import FileFault, FileFaultKind
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_common.measurements import Evaluation
from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_common.structs import struct_values
from bitmill_quantizer.jobs import Job, JobError, JobEvent, JobPhase, JobState, Progress
from bitmill_quantizer.planner import Plan
from bitmill_quantizer.schemes import TRAITS
from bitmill_quantizer.specs import QuantizationSpec, SpecDraft

SCHEMES: dict[Scheme, recipe_pb2.Scheme] = {
    Scheme.W4A16: recipe_pb2.SCHEME_W4A16,
    Scheme.W8A16: recipe_pb2.SCHEME_W8A16,
    Scheme.W8A8_INT8: recipe_pb2.SCHEME_W8A8_INT8,
}
DEVICES: dict[Device, artifact_pb2.Device] = {
    Device.CPU: artifact_pb2.DEVICE_CPU,
    Device.CUDA: artifact_pb2.DEVICE_CUDA,
}
FAULT_KINDS: dict[FileFaultKind, artifact_service_pb2.FileFaultKind] = {
    FileFaultKind.MISSING: artifact_service_pb2.FILE_FAULT_KIND_MISSING,
    FileFaultKind.SIZE_MISMATCH: artifact_service_pb2.FILE_FAULT_KIND_SIZE_MISMATCH,
    FileFaultKind.DIGEST_MISMATCH: artifact_service_pb2.FILE_FAULT_KIND_DIGEST_MISMATCH,
    FileFaultKind.UNEXPECTED: artifact_service_pb2.FILE_FAULT_KIND_UNEXPECTED,
}
STATES: dict[JobState, quantization_job_pb2.JobState] = {
    JobState.QUEUED: quantization_job_pb2.JOB_STATE_QUEUED,
    JobState.RUNNING: quantization_job_pb2.JOB_STATE_RUNNING,
    JobState.SUCCEEDED: quantization_job_pb2.JOB_STATE_SUCCEEDED,
    JobState.FAILED: quantization_job_pb2.JOB_STATE_FAILED,
    JobState.CANCELLED: quantization_job_pb2.JOB_STATE_CANCELLED,
}
PHASES: dict[JobPhase, quantization_job_pb2.JobPhase] = {
    JobPhase.RESOLVE: quantization_job_pb2.JOB_PHASE_RESOLVE,
    JobPhase.FETCH: quantization_job_pb2.JOB_PHASE_FETCH,
    JobPhase.PREFLIGHT: quantization_job_pb2.JOB_PHASE_PREFLIGHT,
    JobPhase.QUANTIZE: quantization_job_pb2.JOB_PHASE_QUANTIZE,
    JobPhase.EVALUATE: quantization_job_pb2.JOB_PHASE_EVALUATE,
    JobPhase.SAVE: quantization_job_pb2.JOB_PHASE_SAVE,
    JobPhase.UPLOAD: quantization_job_pb2.JOB_PHASE_UPLOAD,
    JobPhase.PUBLISH: quantization_job_pb2.JOB_PHASE_PUBLISH,
}
_SCHEME_OF = {number: scheme for scheme, number in SCHEMES.items()}
_STATE_OF = {number: state for state, number in STATES.items()}


def draft_of(spec: quantization_job_pb2.QuantizationSpec) -> SpecDraft:
    """Takes a spec as it came, unchecked."""
    recipe, calibration = spec.recipe, spec.calibration
    return SpecDraft(
        source_uri=spec.source_uri,
        artifact_name=spec.artifact_name,
        scheme=_SCHEME_OF.get(recipe.scheme),
        unknown_scheme=0 if recipe.scheme in _SCHEME_OF else recipe.scheme,
        group_size=recipe.group_size if recipe.HasField("group_size") else None,
        symmetric=recipe.symmetric if recipe.HasField("symmetric") else None,
        ignore=tuple(recipe.ignore),
        dampening_frac=recipe.dampening_frac if recipe.HasField("dampening_frac") else None,
        seed=recipe.seed if recipe.HasField("seed") else None,
        calibration_uri=calibration.uri,
        num_samples=calibration.num_samples if calibration.HasField("num_samples") else None,
        max_sequence_length=calibration.max_sequence_length if calibration.HasField("max_sequence_length") else None,
        evaluation_tokens=spec.evaluation.num_tokens if spec.evaluation.HasField("num_tokens") else None,
        engine_options=struct_values(spec.engine_options, "spec.engine_options")
        if spec.HasField("engine_options")
        else None,
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
        create_time=_timestamp(job.create_time),
        start_time=_timestamp(job.start_time),
        end_time=_timestamp(job.end_time),
    )


def event_proto(event: JobEvent) -> quantization_job_pb2.JobEvent:
    """Builds an event."""
    return quantization_job_pb2.JobEvent(sequence=event.sequence, time=_timestamp(event.time), job=job_proto(event.job))


def spec_proto(spec: QuantizationSpec) -> quantization_job_pb2.QuantizationSpec:
    """Builds a spec that is accepted as it is."""
    return quantization_job_pb2.QuantizationSpec(
        source_uri=spec.source_uri,
        artifact_name=spec.artifact_name,
        recipe=_recipe_proto(spec.recipe),
        calibration=_calibration_proto(spec.calibration),
        evaluation=quantization_job_pb2.EvaluationSpec(num_tokens=spec.evaluation_tokens),
        engine_options=spec.engine_options,
    )


def plan_proto(
    plan: Plan, asked: quantization_job_pb2.QuantizationSpec
) -> quantizer_service_pb2.PlanQuantizationResponse:
    """Builds the answer to a dry run; the spec as it was asked for when it has no defaults to fill in."""
    checkpoint, estimate = plan.checkpoint, plan.estimate
    return quantizer_service_pb2.PlanQuantizationResponse(
        problems=[
            quantizer_service_pb2.Problem(field=p.field, reason=p.reason, description=p.description)
            for p in plan.problems
        ],
        spec=spec_proto(plan.spec) if plan.spec else asked,
        architecture=checkpoint.architecture if checkpoint else "",
        num_parameters=checkpoint.num_parameters if checkpoint else 0,
        source_size_bytes=checkpoint.size_bytes if checkpoint else 0,
        num_quantized_parameters=estimate.num_quantized_parameters if estimate else 0,
        num_quantized_modules=estimate.num_quantized_modules if estimate else 0,
        estimated_artifact_size_bytes=estimate.artifact_size_bytes if estimate else 0,
        estimated_host_memory_bytes=estimate.host_memory_bytes if estimate else 0,
        estimated_disk_bytes=plan.disk_bytes,
        devices=_device_protos(plan.devices),
    )


def artifact_proto(uri: str, manifest: Manifest, *, with_files: bool = True) -> artifact_pb2.Artifact:
    """Builds an artifact; lists leave its files out."""
    files = manifest.files if with_files else ()
    return artifact_pb2.Artifact(
        name=manifest.name,
        digest=manifest.digest,
        uri=uri,
        size_bytes=manifest.size_bytes,
        files=[
            artifact_pb2.ArtifactFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256) for file in files
        ],
        source_uri=manifest.source_uri,
        source_digest=manifest.source_digest,
        source_size_bytes=manifest.source_size_bytes,
        recipe=_recipe_proto(manifest.recipe),
        calibration=_calibration_proto(manifest.calibration),
        calibration_digest=manifest.calibration_use.digest if manifest.calibration_use else "",
        devices=_device_protos(manifest.devices),
        evaluation=_evaluation_proto(manifest.evaluation),
        engine=manifest.engine,
        versions=manifest.versions,
        job_id=manifest.job_id,
        create_time=_timestamp(manifest.create_time),
        engine_options=manifest.engine_options,
    )


def fault_proto(fault: FileFault) -> artifact_service_pb2.FileFault:
    """Builds a file's fault."""
    return artifact_service_pb2.FileFault(path=fault.path, kind=FAULT_KINDS[fault.kind])


def _recipe_proto(recipe: Recipe) -> recipe_pb2.Recipe:
    has_group_size = TRAITS[recipe.scheme].default_group_size is not None
    return recipe_pb2.Recipe(
        scheme=SCHEMES[recipe.scheme],
        group_size=recipe.group_size if has_group_size else None,
        symmetric=recipe.symmetric,
        ignore=recipe.ignore,
        dampening_frac=recipe.dampening_frac,
        seed=recipe.seed,
    )


def _calibration_proto(calibration: Calibration) -> recipe_pb2.Calibration:
    return recipe_pb2.Calibration(
        uri=calibration.uri,
        num_samples=calibration.num_samples,
        max_sequence_length=calibration.max_sequence_length,
    )


def _evaluation_proto(evaluation: Evaluation) -> artifact_pb2.Evaluation:
    return artifact_pb2.Evaluation(
        source_perplexity=evaluation.source_perplexity,
        artifact_perplexity=evaluation.artifact_perplexity,
        mean_kl_divergence=evaluation.mean_kl_divergence,
        num_tokens=evaluation.num_tokens,
    )


def _device_protos(devices: Iterable[DeviceSupport]) -> list[artifact_pb2.DeviceSupport]:
    return [
        artifact_pb2.DeviceSupport(
            device=DEVICES[support.device], min_compute_capability=support.min_compute_capability
        )
        for support in devices
    ]


def _progress_proto(progress: Progress) -> quantization_job_pb2.JobProgress:
    return quantization_job_pb2.JobProgress(
        completed=progress.completed, total=progress.total, unit=progress.unit, loss=progress.loss
    )


def _error_proto(error: JobError) -> quantization_job_pb2.JobError:
    return quantization_job_pb2.JobError(reason=error.reason, message=error.message, metadata=error.metadata)


def _timestamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    timestamp = Timestamp()
    timestamp.FromDatetime(time)
    return timestamp
