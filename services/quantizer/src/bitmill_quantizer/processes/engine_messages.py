"""The domain's data in the words of the engine protocol; engines/README.md describes them.

The parsers raise KeyError, TypeError or ValueError for a result that the protocol does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitmill_common.measurements import CalibrationUse, Evaluation, LayerLoss, ModuleResult, Sensitivity
from bitmill_common.recipes import AdaptiveSearch, Calibration, Recipe, Scheme, Treatment
from bitmill_quantizer.ports import EvaluateOutcome, QuantizeOutcome

Message = Mapping[str, Any]


def recipe_json(recipe: Recipe) -> dict[str, object]:
    """Returns a recipe as an engine reads it."""
    return {
        **_treatment_json(recipe.treatment),
        "activation_order": recipe.activation_order.value,
        "ignore": list(recipe.ignore),
        "rules": [{"pattern": rule.pattern, **_treatment_json(rule.treatment)} for rule in recipe.rules],
        "kv_cache": recipe.kv_cache.value if recipe.kv_cache else None,
        "smoothing_strength": recipe.smoothing_strength,
        "dampening_frac": recipe.dampening_frac,
        "seed": recipe.seed,
        "adaptive": _adaptive_json(recipe.adaptive) if recipe.adaptive else None,
    }


def _treatment_json(treatment: Treatment) -> dict[str, object]:
    return {
        "scheme": treatment.scheme.value,
        "algorithm": treatment.algorithm.value,
        "group_size": treatment.group_size,
        "symmetric": treatment.symmetric,
    }


def _adaptive_json(search: AdaptiveSearch) -> dict[str, object]:
    return {
        "candidates": [_treatment_json(candidate) for candidate in search.candidates],
        "max_size_bytes": search.max_size_bytes,
        "max_perplexity_ratio": search.max_perplexity_ratio,
        "num_samples": search.num_samples,
    }


def calibration_json(calibration: Calibration, path: Path | None) -> dict[str, object]:
    """Returns what to calibrate with; `path` is where its text lies on this host, None for the engine's own."""
    return {
        "path": path and str(path),
        "packing": calibration.packing.value,
        "num_samples": calibration.num_samples,
        "max_sequence_length": calibration.max_sequence_length,
    }


def parse_quantize_result(result: Message) -> QuantizeOutcome:
    """Reads the result of `quantize`."""
    calibration = result["calibration"]
    return QuantizeOutcome(
        versions={str(name): str(version) for name, version in result["versions"].items()},
        num_quantized_modules=int(result["num_quantized_modules"]),
        format=str(result["format"]),
        calibration_use=None if calibration is None else _parse_calibration_use(calibration),
        modules=tuple(_parse_module(each) for each in result["modules"]),
        sensitivities=tuple(_parse_sensitivity(each) for each in result["sensitivities"]),
        peak_memory_bytes=int(result.get("peak_memory_bytes", 0)),
        peak_device_memory_bytes=int(result.get("peak_device_memory_bytes", 0)),
    )


def _parse_calibration_use(value: Message) -> CalibrationUse:
    return CalibrationUse(
        digest=str(value["digest"]),
        num_samples=int(value["num_samples"]),
        num_tokens=int(value["num_tokens"]),
        num_documents=int(value["num_documents"]),
        uncalibrated_modules=tuple(str(name) for name in value["uncalibrated_modules"]),
    )


def _parse_module(value: Message) -> ModuleResult:
    loss, dampening_frac = value.get("loss"), value.get("dampening_frac")
    return ModuleResult(
        name=str(value["name"]),
        scheme=Scheme(value["scheme"]),
        group_size=int(value["group_size"]),
        loss=None if loss is None else float(loss),
        dampening_frac=None if dampening_frac is None else float(dampening_frac),
        remark=str(value.get("remark", "")),
    )


def _parse_sensitivity(value: Message) -> Sensitivity:
    return Sensitivity(
        modules=tuple(str(name) for name in value["modules"]),
        scheme=Scheme(value["scheme"]),
        group_size=int(value["group_size"]),
        kl_divergence=float(value["kl_divergence"]),
        size_bytes=int(value["size_bytes"]),
        chosen=bool(value["chosen"]),
    )


def parse_evaluate_result(result: Message) -> EvaluateOutcome:
    """Reads the result of `evaluate`."""
    evaluation = Evaluation(
        source_perplexity=float(result["source_perplexity"]),
        artifact_perplexity=float(result["artifact_perplexity"]),
        mean_kl_divergence=float(result["mean_kl_divergence"]),
        num_tokens=int(result["num_tokens"]),
        p99_kl_divergence=float(result["p99_kl_divergence"]),
        top1_agreement=float(result["top1_agreement"]),
        layer_losses=tuple(
            LayerLoss(str(each["layer"]), float(each["relative_error"])) for each in result["layer_losses"]
        ),
    )
    return EvaluateOutcome(
        evaluation, int(result.get("peak_memory_bytes", 0)), int(result.get("peak_device_memory_bytes", 0))
    )
