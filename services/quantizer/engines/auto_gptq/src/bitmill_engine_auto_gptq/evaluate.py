"""The operation `evaluate`: loads the source, and the artifact with AutoGPTQ's layers; the kit compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from auto_gptq.modeling._utils import make_quant
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import no_init_weights

from bitmill_engine_auto_gptq.quantize import require_cuda
from bitmill_engine_auto_gptq.transformers4 import readable_copy
from bitmill_engine_kit import evaluation
from bitmill_engine_kit.gptq_layout import WEIGHT_SUFFIX, dtype_of
from bitmill_engine_kit.hugging_face import load_model, load_tokenizer, require_complete, require_context
from bitmill_engine_kit.protocol import EvaluateRequest, EventWriter


def evaluate(request: EvaluateRequest, events: EventWriter) -> dict[str, Any]:
    """Measure, and return the fields of the result event; num_tokens is less than asked for if the text ends first."""
    require_cuda()
    with readable_copy(request.source_dir) as source_dir:
        tokenizer = load_tokenizer(source_dir)
        source = load_model(source_dir, dtype_of(request.source_dir))
    require_context(source, request.window)
    with readable_copy(request.model_dir) as model_dir:
        artifact = load_artifact(model_dir)
    return evaluation.evaluate(
        source.to("cuda"),
        artifact.to("cuda"),
        tokenizer,
        request,
        lambda completed: events.progress("evaluate", completed, request.num_tokens, "tokens"),
    )


def load_artifact(model_dir: Path) -> PreTrainedModel:
    """Load a model directory of this engine, with AutoGPTQ's layers wherever the files hold packed weights.

    AutoGPTQ's own `from_quantized` takes every layer for a packed one, also those that a recipe left as they were.
    Raises EngineError CHECKPOINT_INCOMPLETE when weights are missing.
    """
    tensors = {
        name: tensor for path in sorted(model_dir.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    quantization = config.quantization_config
    del config.quantization_config
    dtype = getattr(torch, dtype_of(model_dir))
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, trust_remote_code=False)
    packed = [name.removesuffix(WEIGHT_SUFFIX) for name in tensors if name.endswith(WEIGHT_SUFFIX)]
    make_quant(
        model,
        packed,
        quantization["bits"],
        quantization["group_size"],
        desc_act=False,
        disable_exllama=True,
        disable_exllamav2=True,
    )
    missing, _ = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # Packed layers have a bias, zero unless it is loaded; a tied head is the embedding.
    expected = {f"{name}.bias" for name in packed}
    if config.tie_word_embeddings:
        expected.add("lm_head.weight")
    require_complete(set(missing) - expected)
    return model.eval()
