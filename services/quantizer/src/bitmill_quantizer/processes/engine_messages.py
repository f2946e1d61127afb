"""The domain's data in the words of the engine protocol; engines/README.md describes them.

The parsers raise KeyError, TypeError or ValueError for a result that the protocol does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitmill_common.json_fields import optional, take, take_count, take_number, take_rows, take_text_map
from bitmill_common.manifest_measurements import parse_calibration_use, parse_module, parse_sensitivity
from bitmill_common.measurements import Evaluation, LayerLoss, ModuleResult
from bitmill_common.recipes import AdaptiveSearch, Calibration, Recipe, Treatment
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
    use = result["calibration"]
    return QuantizeOutcome(
        versions=take_text_map(result, "versions"),
        num_quantized_modules=take_count(result, "num_quantized_modules", bits=32),
        format=take(result, "format", str),
        calibration_use=None if use is None else parse_calibration_use(use, take(use, "digest", str)),
        modules=take_rows(result, "modules", _parse_module),
        sensitivities=take_rows(result, "sensitivities", parse_sensitivity),
        peak_memory_bytes=_peak(result, "peak_memory_bytes"),
        peak_device_memory_bytes=_peak(result, "peak_device_memory_bytes"),
    )


def _parse_module(value: Any) -> ModuleResult:
    return parse_module({"remark": "", **value})


def _peak(result: Message, key: str) -> int:
    return optional(result, key, lambda: take_count(result, key), 0)


def parse_evaluate_result(result: Message) -> EvaluateOutcome:
    """Reads the result of `evaluate`."""
    evaluation = Evaluation(
        source_perplexity=take_number(result, "source_perplexity"),
        artifact_perplexity=take_number(result, "artifact_perplexity"),
        mean_kl_divergence=take_number(result, "mean_kl_divergence"),
        num_tokens=take_count(result, "num_tokens"),
        p99_kl_divergence=take_number(result, "p99_kl_divergence"),
        top1_agreement=take_number(result, "top1_agreement"),
        layer_losses=take_rows(result, "layer_losses", _parse_layer_loss),
    )
    return EvaluateOutcome(evaluation, _peak(result, "peak_memory_bytes"), _peak(result, "peak_device_memory_bytes"))


def _parse_layer_loss(value: object) -> LayerLoss:
    return LayerLoss(take(value, "layer", str), take_number(value, "relative_error"))
