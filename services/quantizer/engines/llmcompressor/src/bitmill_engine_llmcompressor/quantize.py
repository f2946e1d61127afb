"""The operation `quantize`: a checkpoint directory in, a compressed-tensors model directory out."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from bitmill_engine_kit.calibration import Samples, build_samples
from bitmill_engine_kit.plan import AS_IT_IS, Plan, plan_layers
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EngineError, EventWriter, QuantizeRequest, Recipe
from bitmill_engine_llmcompressor import adaptive, calibration_cuda, gguf, gptq_cpu, moe, recipes, smoothing
from bitmill_engine_llmcompressor.calibration_cuda import BatchPlan, plan_batches
from bitmill_engine_llmcompressor.checkpoints import device, load_source, load_tokenizer, require_context
from bitmill_engine_llmcompressor.gptq import OnLayer, PlanModifier
from bitmill_engine_llmcompressor.rows import Outcome, module_rows
from bitmill_engine_llmcompressor.saving import count_quantized_modules, save

_LIBRARIES = ("llmcompressor", "torch", "transformers", "compressed-tensors")


def quantize(request: QuantizeRequest, events: EventWriter) -> dict[str, Any]:
    """Quantize, save, check what was saved, and return the fields of the result event."""
    recipe = request.recipe
    if request.output_dir.exists() and any(request.output_dir.iterdir()):
        raise EngineError("OUTPUT_NOT_EMPTY", f"{request.output_dir} is not empty")
    recipes.require_supported(recipe)
    set_seed(recipe.seed % 2**32)
    tokenizer = load_tokenizer(request.source_dir)
    calibrates = recipes.needs_calibration(recipe)
    samples = build_samples(request.calibration, tokenizer, recipe.seed) if calibrates else None
    model = load_source(request.source_dir)
    if samples is not None:
        require_context(model, request.calibration.max_sequence_length)
    _require_finite(model)
    plan = plan_layers(recipes.shapes(model), recipe)
    sensitivities: list[dict[str, Any]] = []
    if samples is not None and recipe.adaptive is not None:
        plan, sensitivities = adaptive.resolve(plan, model, request, samples, events)
    with moe.RoutedTokens(model) as routed:
        outcomes = compress(model, tokenizer, samples, plan, recipe, _reporter(events))
    save(model, tokenizer, request.source_dir, request.output_dir)
    return {
        "versions": {name: version(name) for name in _LIBRARIES} | {"python": platform.python_version()},
        "format": "compressed-tensors",
        "calibration": samples and samples.result(uncalibrated_modules=routed.unreached()),
        "modules": module_rows(plan, outcomes, moe.row_name),
        "sensitivities": sensitivities,
        "num_quantized_modules": _count(request, plan),
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }


def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Samples | None,
    plan: Plan,
    recipe: Recipe,
    on_layer: OnLayer,
) -> Mapping[str, Outcome]:
    """Round the weights of `model` in place, layer by layer; what became of those that GPTQ was to round, by name.

    `samples` is None for a recipe that needs no data. Raises EngineError UNSUPPORTED_RECIPE or NON_FINITE_ACTIVATIONS.
    """
    if recipe.kv_cache is None and all(layer.treatment == AS_IT_IS for layer in plan.values()):
        return {}
    rounding = _rounding(model, plan, recipe).follow(plan, on_layer)
    batches = _batch_plan(model, samples)
    smoothers: list[Modifier] = []
    if recipe.smoothing_strength:
        smoothers.append(smoothing.smoothquant(model, plan, recipe.smoothing_strength).tell(rounding.divide_inputs))
    if any(layer.treatment.algorithm == "AWQ" for layer in plan.values()):
        smoothers.append(smoothing.awq(model, plan, batches.offload_device))
    with contextlib.ExitStack() as stack:
        stack.enter_context(gguf.without_directory(model))
        stack.enter_context(smoothing.exact_norms(smoothing=bool(smoothers)))
        if batches.fused_attention:
            stack.enter_context(calibration_cuda.fused_attention(model))
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=samples and _dataset(samples, batches.batch_size),
            recipe=[*smoothers, rounding],
            # All in one pass over each layer; by default each modifier has a pass of its own over the model.
            pipeline="datafree" if samples is None else "sequential",
            sequential_offload_device=batches.offload_device,
        )
    return rounding.outcomes


def _rounding(model: PreTrainedModel, plan: Plan, recipe: Recipe) -> PlanModifier:
    groups = recipes.config_groups(plan, recipe.activation_order)
    return PlanModifier(
        # llm-compressor makes a group of its own where there is none; without targets it takes no layer.
        config_groups=groups or {"group_0": recipes.no_layers()},
        ignore=recipes.ignored(model, plan),
        kv_cache_scheme=recipes.KV_CACHE if recipe.kv_cache else None,
        dampening_frac=recipe.dampening_frac,
        block_size=gptq_cpu.BLOCK_SIZE,
        requires_calibration_data=recipes.needs_calibration(recipe),
    )


def _dataset(samples: Samples, batch_size: int) -> DataLoader[Any]:
    # Batches are made already: samples differ in length where each document is one.
    inputs: Any = [{"input_ids": torch.tensor(batch)} for batch in samples.batches(batch_size)]
    return DataLoader(inputs, batch_size=None)


def _batch_plan(model: PreTrainedModel, samples: Samples | None) -> BatchPlan:
    """How to calibrate on the device there is."""
    if samples is None or device().type == "cpu":
        return BatchPlan(batch_size=1, offload_device="cpu", fused_attention=False)
    free_bytes, _ = torch.cuda.mem_get_info()
    return plan_batches(model.config, len(samples.token_ids), samples.max_length, free_bytes)


def _reporter(events: EventWriter) -> OnLayer:
    return lambda completed, total, loss, remark: events.progress(
        "quantize", completed, total, "layers", loss=loss, message=remark
    )


def _require_finite(model: PreTrainedModel) -> None:
    """Raise EngineError NON_FINITE_WEIGHTS when the source holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise EngineError("NON_FINITE_WEIGHTS", f"{name} of the source holds a NaN or an infinity", tensor=name)


def _count(request: QuantizeRequest, plan: Plan) -> int:
    """The number of quantized layers in the saved files, which must be that of the plan."""
    planned = sum(layer.treatment != AS_IT_IS for layer in plan.values())
    if (saved := count_quantized_modules(request.output_dir)) != planned:
        raise RuntimeError(f"{planned} layers were quantized; the files have {saved}")
    return saved
