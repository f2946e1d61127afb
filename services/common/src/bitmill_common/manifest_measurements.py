"""What a job measured, in the manifest's JSON. Fields that came later than the first manifests are optional."""

from __future__ import annotations

from typing import Any

from bitmill_common.json_fields import (
    check,
    nullable,
    optional,
    take,
    take_count,
    take_name,
    take_number,
    take_rows,
    take_text_map,
    take_texts,
)
from bitmill_common.manifest_recipe import take_group_size
from bitmill_common.measurements import (
    CalibrationUse,
    Evaluation,
    LayerLoss,
    ModuleResult,
    PhaseCost,
    Sensitivity,
    Verification,
)
from bitmill_common.recipes import Scheme

# What google.protobuf.Duration holds.
_MAX_DURATION_S = 315_576_000_000


def evaluation_to_json(evaluation: Evaluation) -> dict[str, object]:
    """Returns an evaluation's JSON."""
    return {
        "source_perplexity": evaluation.source_perplexity,
        "artifact_perplexity": evaluation.artifact_perplexity,
        "mean_kl_divergence": evaluation.mean_kl_divergence,
        "num_tokens": evaluation.num_tokens,
        "p99_kl_divergence": evaluation.p99_kl_divergence,
        "top1_agreement": evaluation.top1_agreement,
        "layer_losses": [
            {"layer": each.layer, "relative_error": each.relative_error} for each in evaluation.layer_losses
        ],
    }


def parse_evaluation(value: dict[str, Any]) -> Evaluation:
    """Reads an evaluation; `ValueError` for one that cannot be."""
    return Evaluation(
        source_perplexity=take_number(value, "source_perplexity"),
        artifact_perplexity=take_number(value, "artifact_perplexity"),
        mean_kl_divergence=take_number(value, "mean_kl_divergence"),
        num_tokens=take_count(value, "num_tokens"),
        p99_kl_divergence=optional(value, "p99_kl_divergence", lambda: take_number(value, "p99_kl_divergence"), 0.0),
        top1_agreement=optional(value, "top1_agreement", lambda: take_number(value, "top1_agreement"), 0.0),
        layer_losses=optional(value, "layer_losses", lambda: take_rows(value, "layer_losses", _parse_layer_loss), ()),
    )


def _parse_layer_loss(value: object) -> LayerLoss:
    return LayerLoss(take(value, "layer", str), take_number(value, "relative_error"))


def calibration_use_to_json(use: CalibrationUse) -> dict[str, object]:
    """Returns the JSON of what calibration used, but for the digest, which stands beside what was asked for."""
    return {
        "num_samples": use.num_samples,
        "num_tokens": use.num_tokens,
        "num_documents": use.num_documents,
        "uncalibrated_modules": list(use.uncalibrated_modules),
    }


def parse_calibration_use(value: dict[str, Any], digest: str) -> CalibrationUse:
    """Reads what calibration used; `ValueError` for what cannot be."""
    return CalibrationUse(
        digest=digest,
        num_samples=take_count(value, "num_samples"),
        num_tokens=take_count(value, "num_tokens"),
        num_documents=take_count(value, "num_documents"),
        uncalibrated_modules=take_texts(value, "uncalibrated_modules"),
    )


def module_to_json(module: ModuleResult) -> dict[str, object]:
    """Returns the JSON of what became of a layer."""
    return {
        "name": module.name,
        "scheme": module.scheme.value,
        "group_size": module.group_size,
        "loss": module.loss,
        "dampening_frac": module.dampening_frac,
        "remark": module.remark,
    }


def parse_module(value: Any) -> ModuleResult:
    """Reads what became of a layer; `ValueError` for what cannot be."""
    return ModuleResult(
        name=take(value, "name", str),
        scheme=take_name(value, "scheme", Scheme),
        group_size=take_group_size(value),
        loss=nullable(value, "loss", lambda: take_number(value, "loss")),
        dampening_frac=nullable(value, "dampening_frac", lambda: take_number(value, "dampening_frac")),
        remark=take(value, "remark", str),
    )


def sensitivity_to_json(sensitivity: Sensitivity) -> dict[str, object]:
    """Returns the JSON of what ADAPTIVE measured for one choice."""
    return {
        "modules": list(sensitivity.modules),
        "scheme": sensitivity.scheme.value,
        "group_size": sensitivity.group_size,
        "kl_divergence": sensitivity.kl_divergence,
        "size_bytes": sensitivity.size_bytes,
        "chosen": sensitivity.chosen,
    }


def parse_sensitivity(value: object) -> Sensitivity:
    """Reads what ADAPTIVE measured for one choice; `ValueError` for what cannot be."""
    return Sensitivity(
        modules=take_texts(value, "modules"),
        scheme=take_name(value, "scheme", Scheme),
        group_size=take_group_size(value),
        kl_divergence=take_number(value, "kl_divergence"),
        size_bytes=take_count(value, "size_bytes"),
        chosen=take(value, "chosen", bool),
    )


def phase_cost_to_json(cost: PhaseCost) -> dict[str, object]:
    """Returns the JSON of what a phase cost."""
    return {
        "phase": cost.phase,
        "duration_s": cost.duration_s,
        "peak_memory_bytes": cost.peak_memory_bytes,
        "peak_device_memory_bytes": cost.peak_device_memory_bytes,
    }


def parse_phase_cost(value: object) -> PhaseCost:
    """Reads what a phase cost; `ValueError` for what cannot be."""
    duration_s = take_number(value, "duration_s")
    check(0 <= duration_s <= _MAX_DURATION_S, f"duration_s must be from 0 to {_MAX_DURATION_S}")
    return PhaseCost(
        phase=take(value, "phase", str),
        duration_s=duration_s,
        peak_memory_bytes=take_count(value, "peak_memory_bytes"),
        peak_device_memory_bytes=take_count(value, "peak_device_memory_bytes"),
    )


def verification_to_json(verification: Verification) -> dict[str, object]:
    """Returns a verification's JSON."""
    return {
        "text": verification.text,
        "num_tokens": verification.num_tokens,
        "device": verification.device,
        "versions": dict(verification.versions),
        "skipped": verification.skipped,
    }


def parse_verification(value: dict[str, Any]) -> Verification:
    """Reads a verification; `ValueError` for one that cannot be."""
    return Verification(
        text=take(value, "text", str),
        num_tokens=take_count(value, "num_tokens", bits=32),
        device=take(value, "device", str),
        versions=take_text_map(value, "versions"),
        skipped=take(value, "skipped", str),
    )
