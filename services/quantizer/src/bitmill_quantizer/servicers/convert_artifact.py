"""From artifacts in the domain to their protos."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from bitmill.artifact.v1 import artifact_pb2, artifact_service_pb2, measurement_pb2
from bitmill_common.artifact import Device, DeviceSupport, Manifest
from bitmill_common.artifacts import FileFault, FileFaultKind
from bitmill_common.measurements import (
    CalibrationUse,
    Evaluation,
    ModuleResult,
    PhaseCost,
    Sensitivity,
    Verification,
)
from bitmill_quantizer.servicers.convert_recipe import SCHEMES, calibration_proto, candidate_proto, recipe_proto

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


def artifact_proto(uri: str, manifest: Manifest, *, whole: bool = True) -> artifact_pb2.Artifact:
    """Builds an artifact; lists leave its files and the rows of its measurements out."""
    use, verification = manifest.calibration_use, manifest.verification
    return artifact_pb2.Artifact(
        name=manifest.name,
        digest=manifest.digest,
        uri=uri,
        size_bytes=manifest.size_bytes,
        files=[
            artifact_pb2.ArtifactFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in (manifest.files if whole else ())
        ],
        source_uri=manifest.source_uri,
        source_digest=manifest.source_digest,
        source_size_bytes=manifest.source_size_bytes,
        recipe=recipe_proto(manifest.recipe),
        calibration=calibration_proto(manifest.calibration),
        calibration_digest=use.digest if use else "",
        devices=device_protos(manifest.devices),
        evaluation=_evaluation_proto(manifest.evaluation, whole=whole),
        engine=manifest.engine,
        versions=manifest.versions,
        job_id=manifest.job_id,
        create_time=timestamp(manifest.create_time),
        engine_options=manifest.engine_options,
        calibration_use=_calibration_use_proto(use) if use else None,
        modules=[_module_proto(module) for module in (manifest.modules if whole else ())],
        sensitivities=[_sensitivity_proto(each) for each in (manifest.sensitivities if whole else ())],
        phase_costs=[_phase_cost_proto(cost) for cost in (manifest.phase_costs if whole else ())],
        verification=_verification_proto(verification) if verification else None,
        format=manifest.format,
    )


def fault_proto(fault: FileFault) -> artifact_service_pb2.FileFault:
    """Builds a file's fault."""
    return artifact_service_pb2.FileFault(path=fault.path, kind=FAULT_KINDS[fault.kind])


def device_protos(devices: Iterable[DeviceSupport]) -> list[artifact_pb2.DeviceSupport]:
    """Builds devices that can serve an artifact."""
    return [
        artifact_pb2.DeviceSupport(
            device=DEVICES[support.device], min_compute_capability=support.min_compute_capability
        )
        for support in devices
    ]


def timestamp(time: datetime | None) -> Timestamp | None:
    """Builds a time, where there is one."""
    if time is None:
        return None
    proto = Timestamp()
    proto.FromDatetime(time)
    return proto


def duration(seconds: float) -> Duration:
    """Builds a duration, to the microsecond."""
    proto = Duration()
    proto.FromTimedelta(timedelta(seconds=seconds))
    return proto


def _evaluation_proto(evaluation: Evaluation, *, whole: bool) -> artifact_pb2.Evaluation:
    return artifact_pb2.Evaluation(
        source_perplexity=evaluation.source_perplexity,
        artifact_perplexity=evaluation.artifact_perplexity,
        mean_kl_divergence=evaluation.mean_kl_divergence,
        num_tokens=evaluation.num_tokens,
        p99_kl_divergence=evaluation.p99_kl_divergence,
        top1_agreement=evaluation.top1_agreement,
        layer_losses=[
            measurement_pb2.LayerLoss(layer=each.layer, relative_error=each.relative_error)
            for each in (evaluation.layer_losses if whole else ())
        ],
    )


def _calibration_use_proto(use: CalibrationUse) -> measurement_pb2.CalibrationUse:
    return measurement_pb2.CalibrationUse(
        num_samples=use.num_samples,
        num_tokens=use.num_tokens,
        num_documents=use.num_documents,
        uncalibrated_modules=use.uncalibrated_modules,
    )


def _module_proto(module: ModuleResult) -> measurement_pb2.ModuleResult:
    return measurement_pb2.ModuleResult(
        name=module.name,
        scheme=SCHEMES[module.scheme],
        group_size=module.group_size,
        loss=module.loss,
        dampening_frac=module.dampening_frac,
        remark=module.remark,
    )


def _sensitivity_proto(sensitivity: Sensitivity) -> measurement_pb2.Sensitivity:
    return measurement_pb2.Sensitivity(
        modules=sensitivity.modules,
        candidate=candidate_proto(sensitivity.scheme, sensitivity.group_size),
        kl_divergence=sensitivity.kl_divergence,
        size_bytes=sensitivity.size_bytes,
        chosen=sensitivity.chosen,
    )


def _phase_cost_proto(cost: PhaseCost) -> measurement_pb2.PhaseCost:
    return measurement_pb2.PhaseCost(
        phase=cost.phase,
        duration=duration(cost.duration_s),
        peak_memory_bytes=cost.peak_memory_bytes,
        peak_device_memory_bytes=cost.peak_device_memory_bytes,
    )


def _verification_proto(verification: Verification) -> measurement_pb2.Verification:
    return measurement_pb2.Verification(
        text=verification.text,
        num_tokens=verification.num_tokens,
        device=verification.device,
        versions=verification.versions,
        skipped=verification.skipped,
    )
