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
from bitmill_common.recipes import Calibration
from bitmill_quantizer.ports import EvaluateOutcome, QuantizeOutcome

Message = Mapping[str, Any]


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
