"""The operation `evaluate`: loads source and artifact as transformers reads them; the kit compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressed_tensors.offload.dispatch import remove_dispatch
from transformers import CompressedTensorsConfig, PreTrainedModel

from bitmill_engine_kit import evaluation
from bitmill_engine_kit.protocol import EvaluateRequest, EventWriter
from bitmill_engine_llmcompressor.checkpoints import device, load_model, load_tokenizer, require_context


def evaluate(request: EvaluateRequest, events: EventWriter) -> dict[str, Any]:
    """Measure, and return the fields of the result event; num_tokens is less than asked for if the text ends first."""
    tokenizer = load_tokenizer(request.source_dir)
    source = load_model(request.source_dir).to(device())
    require_context(source, request.window)
    artifact = load_artifact(request.model_dir)
    return evaluation.evaluate(
        source,
        artifact,
        tokenizer,
        request,
        lambda completed: events.progress("evaluate", completed, request.num_tokens, "tokens"),
    )


def load_artifact(model_dir: Path) -> PreTrainedModel:
    """Load a model directory of this engine.

    Activations stay quantized as they are when served; weights are unpacked once instead of at every step.
    """
    if "quantization_config" not in json.loads((model_dir / "config.json").read_bytes()):
        return load_model(model_dir).to(device())
    artifact = load_model(model_dir, quantization_config=CompressedTensorsConfig(dequantize=True))
    # On a host with a GPU loading spreads the model by hooks, which leave what it answers on the processor.
    loaded: PreTrainedModel = remove_dispatch(artifact, onload_tensors=True).to(device())
    return loaded
