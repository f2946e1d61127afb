"""The operation `evaluate`: loads the source, and the artifact with GPTQModel; the kit compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from transformers import PreTrainedModel

from bitmill_engine_kit import evaluation
from bitmill_engine_kit.gptq_layout import dtype_of
from bitmill_engine_kit.hugging_face import device, load_model, load_tokenizer, require_context
from bitmill_engine_kit.protocol import EvaluateRequest, EventWriter


def evaluate(request: EvaluateRequest, events: EventWriter) -> dict[str, Any]:
    """Measure, and return the fields of the result event; num_tokens is less than asked for if the text ends first."""
    tokenizer = load_tokenizer(request.source_dir)
    source = load_model(request.source_dir, dtype_of(request.source_dir)).to(device())
    require_context(source, request.window)
    artifact = load_artifact(request.model_dir).to(device())
    return evaluation.evaluate(
        source,
        artifact,
        tokenizer,
        request,
        lambda completed: events.progress("evaluate", completed, request.num_tokens, "tokens"),
    )


def load_artifact(model_dir: Path) -> PreTrainedModel:
    """Load a model directory of this engine; weights are unpacked once instead of at every step."""
    loaded = GPTQModel.load(
        str(model_dir), device="cpu", backend=BACKEND.TORCH, dtype=getattr(torch, dtype_of(model_dir))
    )
    model: PreTrainedModel = loaded.model
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseQuantLinear)]
    for name, module in packed:
        model.set_submodule(name, _unpacked(module, model.dtype))
    return model.eval()


def _unpacked(module: BaseQuantLinear, dtype: torch.dtype) -> torch.nn.Linear:
    weight = module.dequantize_weight().T.to(dtype)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    if module.bias is not None:
        linear.bias = torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)
    return linear
