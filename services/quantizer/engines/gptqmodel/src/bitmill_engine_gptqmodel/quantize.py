"""The operation `quantize`: a checkpoint directory in, a model directory in the classic GPTQ layout out."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gptqmodel.models._const import DEVICE
from gptqmodel.models.auto import MODEL_MAP
from gptqmodel.quantization.config import GPTQConfig
from transformers import PreTrainedModel, set_seed

from bitmill_engine_gptqmodel.gptq import reporting
from bitmill_engine_kit import gptq_layout
from bitmill_engine_kit.calibration import Samples, build_samples
from bitmill_engine_kit.hugging_face import (
    device,
    linear_shapes,
    load_model,
    load_tokenizer,
    peak_device_memory_bytes,
    require_context,
    require_finite,
    require_model_type,
)
from bitmill_engine_kit.plan import Plan, plan_layers
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EventWriter, QuantizeRequest, Recipe
from bitmill_engine_kit.rounding import RoundingReport
from bitmill_engine_kit.saved_model import copy_companions, count_quantized_layers, keep_only_weights, require_empty

ENGINE = "gptqmodel"
MODEL_TYPES = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "stablelm",
)
"""Those that GPTQModel rounds as transformers holds them; of others it takes fused matrices apart."""
_LIBRARIES = ("gptqmodel", "torch", "transformers")


def quantize(request: QuantizeRequest, events: EventWriter) -> dict[str, Any]:
    """Quantize, save, check what was saved, and return the fields of the result event."""
    require_empty(request.output_dir)
    gptq_layout.require_supported(request.recipe, ENGINE, one_treatment=False)
    set_seed(request.recipe.seed % 2**32)
    samples = build_samples(request.calibration, load_tokenizer(request.source_dir), request.recipe.seed)
    dtype = gptq_layout.dtype_of(request.source_dir)
    model = load_model(request.source_dir, dtype)
    require_model_type(model, MODEL_TYPES)
    require_context(model, samples.max_length)
    require_finite(model)
    plan = plan_layers(linear_shapes(model), request.recipe)
    report = RoundingReport(plan, request.recipe.dampening_frac, events)
    rounded = _round(model, plan, samples, request.recipe, report, request.source_dir)
    _save(rounded, plan, request, dtype)
    return {
        "versions": {name: version(name) for name in _LIBRARIES} | {"python": platform.python_version()},
        "format": gptq_layout.FORMAT,
        "calibration": samples.result(),
        "modules": report.modules(),
        "sensitivities": [],
        "num_quantized_modules": count_quantized_layers(
            request.output_dir, gptq_layout.WEIGHT_SUFFIX, gptq_layout.SCALE_SUFFIX
        ),
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": peak_device_memory_bytes(),
    }


def _round(
    model: PreTrainedModel, plan: Plan, samples: Samples, recipe: Recipe, report: RoundingReport, source_dir: Path
) -> Any:
    """Round the weights of `model`, layer by layer; returns GPTQModel's hold of it, whose layers are packed."""
    treatment = recipe.treatment
    static = recipe.activation_order == "STATIC"
    config = GPTQConfig(
        bits=gptq_layout.BITS[treatment.scheme],
        group_size=treatment.group_size,
        dynamic=gptq_layout.dynamic_rules(plan, recipe) or None,
        sym=treatment.symmetric,
        desc_act=static,
        static_groups=static,
        act_group_aware=False,
        fallback=None,
        offload_to_disk=False,
        device=DEVICE(device().type),
    )
    config.damp_percent = recipe.dampening_frac
    model.seqlen = samples.max_length
    wrapped = MODEL_MAP[model.config.model_type](
        model, quantized=False, quantize_config=config, model_local_path=str(source_dir)
    )
    examples = [_example(sample) for sample in samples.token_ids]
    with reporting(report, len(examples)):
        wrapped.quantize(examples, calibration_sort=None, batch_size=1)
    return wrapped


def _example(sample: Any) -> dict[str, torch.Tensor]:
    token_ids = torch.tensor(sample)[None]
    return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}


def _save(rounded: Any, plan: Plan, request: QuantizeRequest, dtype: str) -> None:
    """Write the model directory: packed weights, config, and the source's own companions."""
    request.output_dir.mkdir(parents=True, exist_ok=True)
    rounded.save_quantized(str(request.output_dir), max_shard_size="5GB")
    keep_only_weights(request.output_dir)
    rules = {"dynamic": gptq_layout.dynamic_rules(plan, request.recipe)}
    quantization = gptq_layout.quantization_config(request.recipe) | rules
    gptq_layout.write_config(request.source_dir, request.output_dir, quantization, dtype)
    copy_companions(request.source_dir, request.output_dir)
