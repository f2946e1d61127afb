"""The operation `quantize`: a checkpoint directory in, a model directory in the classic GPTQ layout out."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import GPTQ_CAUSAL_LM_MODEL_MAP
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel, set_seed

from bitmill_engine_auto_gptq.gptq import reporting
from bitmill_engine_auto_gptq.transformers4 import readable_copy
from bitmill_engine_kit import gptq_layout
from bitmill_engine_kit.calibration import Samples, build_samples
from bitmill_engine_kit.hugging_face import (
    linear_shapes,
    load_model,
    load_tokenizer,
    peak_device_memory_bytes,
    require_context,
    require_finite,
    require_model_type,
)
from bitmill_engine_kit.plan import AS_IT_IS, Plan, plan_layers
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EngineError, EventWriter, QuantizeRequest, Recipe
from bitmill_engine_kit.rounding import RoundingReport
from bitmill_engine_kit.saved_model import copy_companions, count_quantized_layers, require_empty

ENGINE = "auto_gptq"
MODEL_TYPES = ("gemma", "llama", "mistral", "qwen2")
"""Those that auto-gptq 0.7.1 knows, transformers 4.49 runs as 5 does, and vLLM serves."""
_LIBRARIES = ("auto-gptq", "torch", "transformers")
# Of the GPU's free memory, what activations may take between layers: they are there twice.
_ACTIVATIONS_FRACTION = 0.25


def quantize(request: QuantizeRequest, events: EventWriter) -> dict[str, Any]:
    """Quantize, save, check what was saved, and return the fields of the result event."""
    require_cuda()
    require_empty(request.output_dir)
    gptq_layout.require_supported(request.recipe, ENGINE, one_treatment=True)
    set_seed(request.recipe.seed % 2**32)
    dtype = gptq_layout.dtype_of(request.source_dir)
    with readable_copy(request.source_dir) as source_dir:
        samples = build_samples(request.calibration, load_tokenizer(source_dir), request.recipe.seed)
        model = load_model(source_dir, dtype)
    require_model_type(model, MODEL_TYPES)
    require_context(model, samples.max_length)
    require_finite(model)
    plan = plan_layers(linear_shapes(model), request.recipe)
    report = RoundingReport(plan, request.recipe.dampening_frac, events)
    _round(model, plan, samples, request.recipe, report)
    _save(model, request, dtype)
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


def require_cuda() -> None:
    """Raise EngineError DEVICE_MISSING without a GPU: AutoGPTQ rounds on CUDA only."""
    if not torch.cuda.is_available():
        raise EngineError("DEVICE_MISSING", "auto_gptq needs CUDA, and this host has none", device="cuda")


def _round(model: PreTrainedModel, plan: Plan, samples: Samples, recipe: Recipe, report: RoundingReport) -> None:
    """Round the weights of `model` in place, layer by layer on the GPU; its layers become packed ones."""
    treatment = recipe.treatment
    config = BaseQuantizeConfig(
        bits=gptq_layout.BITS[treatment.scheme],
        group_size=treatment.group_size,
        desc_act=recipe.activation_order == "STATIC",
        # Without it groups would follow the activation order. One scale per channel is static as it is.
        static_groups=recipe.activation_order == "STATIC" and treatment.group_size > 0,
        sym=treatment.symmetric,
    )
    config.damp_percent = recipe.dampening_frac
    targets = {name: model.get_submodule(name) for name, layer in plan.items() if layer.treatment != AS_IT_IS}
    # AutoGPTQ moves embeddings and layers to the GPU as it needs them, and is older than this module beside them.
    model.model.rotary_emb.to("cuda")
    wrapped = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model, False, config)
    examples = [_example(sample) for sample in samples.token_ids]
    free_bytes, _ = torch.cuda.mem_get_info()
    activation_bytes = samples.num_tokens * model.config.hidden_size * model.dtype.itemsize
    with reporting(report, targets):
        wrapped.quantize(
            examples,
            batch_size=1,  # samples of one length only could be batched without padding
            use_triton=False,
            cache_examples_on_gpu=activation_bytes < _ACTIVATIONS_FRACTION * free_bytes,
        )
    model.to("cpu")


def _example(sample: Any) -> dict[str, torch.Tensor]:
    token_ids = torch.tensor(sample)[None]
    return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}


def _save(model: PreTrainedModel, request: QuantizeRequest, dtype: str) -> None:
    """Write the model directory: packed weights, config, and the source's own companions."""
    request.output_dir.mkdir(parents=True, exist_ok=True)
    names = _tensor_names(request.source_dir)
    # Left out: the second copy of a tied head, and the zero biases of layers that have none.
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name in names or not (name.endswith(".bias") or name == "lm_head.weight")
    }
    save_torch_state_dict(tensors, request.output_dir, max_shard_size="5GB")
    quantization = gptq_layout.quantization_config(request.recipe)
    gptq_layout.write_config(request.source_dir, request.output_dir, quantization, dtype)
    copy_companions(request.source_dir, request.output_dir)


def _tensor_names(checkpoint_dir: Path) -> set[str]:
    names: set[str] = set()
    for path in checkpoint_dir.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            names.update(tensors.keys())
    return names
