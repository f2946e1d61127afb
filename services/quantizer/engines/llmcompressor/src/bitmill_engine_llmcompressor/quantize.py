"""The operation `quantize`: a checkpoint directory in, a compressed-tensors model directory out."""

import contextlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from safetensors import safe_open
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from bitmill_engine_kit.calibration import Samples, build_samples
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EngineError, EventWriter, QuantizeRequest
from bitmill_engine_llmcompressor import calibration_cuda, gptq_cpu, moe
from bitmill_engine_llmcompressor.calibration_cuda import BatchPlan, plan_batches
from bitmill_engine_llmcompressor.checkpoints import (
    copy_companions,
    device,
    load_source,
    load_tokenizer,
    require_context,
)
from bitmill_engine_llmcompressor.gptq import ReportingGPTQModifier
from bitmill_engine_llmcompressor.recipes import quantization_scheme, resolve_ignore

_LIBRARIES = ("llmcompressor", "torch", "transformers", "compressed-tensors")


def quantize(request: QuantizeRequest, events: EventWriter) -> dict[str, Any]:
    """Quantize, save, check what was saved, and return the fields of the result event."""
    if request.output_dir.exists() and any(request.output_dir.iterdir()):
        raise EngineError("OUTPUT_NOT_EMPTY", f"{request.output_dir} is not empty")
    set_seed(request.recipe.seed % 2**32)
    tokenizer = load_tokenizer(request.source_dir)
    samples = build_samples(request.calibration, tokenizer, request.recipe.seed)
    model = load_source(request.source_dir)
    require_context(model, request.calibration.max_sequence_length)
    _require_finite(model)
    with moe.RoutedTokens(model) as routed:
        _compress(model, tokenizer, samples, request, events)
    _save(model, tokenizer, request)
    return {
        "versions": {name: version(name) for name in _LIBRARIES} | {"python": platform.python_version()},
        "format": "compressed-tensors",
        "calibration": samples.result(uncalibrated_modules=routed.unreached()),
        "modules": [],
        "sensitivities": [],
        "num_quantized_modules": count_quantized_modules(request.output_dir),
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }


def _compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Samples,
    request: QuantizeRequest,
    events: EventWriter,
) -> None:
    """Round the weights of `model` in place, layer by layer."""
    modifier = ReportingGPTQModifier(
        config_groups={"group_0": quantization_scheme(request.recipe)},
        ignore=resolve_ignore(model, request.recipe),
        dampening_frac=request.recipe.dampening_frac,
        block_size=gptq_cpu.BLOCK_SIZE,
    ).report_to(
        lambda completed, total, loss, remark: events.progress(
            "quantize", completed, total, "layers", loss=loss, message=remark
        )
    )
    plan = _plan(model, samples)
    # Batches are made already: samples differ in length where each document is one.
    inputs = [{"input_ids": torch.tensor(batch)} for batch in samples.batches(plan.batch_size)]
    batches = DataLoader(inputs, batch_size=None)
    with calibration_cuda.fused_attention(model) if plan.fused_attention else contextlib.nullcontext():
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=batches,
            recipe=[modifier],
            sequential_offload_device=plan.offload_device,
        )


def _plan(model: PreTrainedModel, samples: Samples) -> BatchPlan:
    """How to calibrate on the device there is."""
    if device().type == "cpu":
        return BatchPlan(batch_size=1, offload_device="cpu", fused_attention=False)
    free_bytes, _ = torch.cuda.mem_get_info()
    return plan_batches(model.config, len(samples.token_ids), samples.max_length, free_bytes)


def _require_finite(model: PreTrainedModel) -> None:
    """Raise EngineError NON_FINITE_WEIGHTS when the source holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise EngineError("NON_FINITE_WEIGHTS", f"{name} of the source holds a NaN or an infinity", tensor=name)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: QuantizeRequest) -> None:
    """Write the model directory: compressed weights, patched config, and the source's own companions."""
    request.output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(request.output_dir, save_compressed=True, max_shard_size="5GB")
    for pattern in ("*.py", "generation_config.json", "recipe.yaml"):
        for path in request.output_dir.glob(pattern):
            path.unlink()
    moe.add_file_names(model, request.output_dir)
    copy_companions(request.source_dir, request.output_dir, tokenizer)


def count_quantized_modules(model_dir: Path) -> int:
    """Count the layers that really are quantized in the saved files.

    Raises EngineError NOTHING_QUANTIZED or NON_FINITE_WEIGHTS: such an artifact must not be published.
    """
    quantized = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise EngineError("NON_FINITE_WEIGHTS", f"{name} holds a NaN or an infinity", tensor=name)
                quantized += name.endswith(".weight_scale")
    if not quantized:
        raise EngineError("NOTHING_QUANTIZED", "the saved model holds no quantized layer")
    return quantized
