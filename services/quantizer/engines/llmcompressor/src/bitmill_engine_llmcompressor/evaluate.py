"""The operation `evaluate`: how far the saved artifact is from its source on text that calibration never saw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.offload.dispatch import remove_dispatch
from transformers import CompressedTensorsConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from bitmill_engine_kit.builtin_text import held_out_documents
from bitmill_engine_kit.calibration import Tokenizer, pack
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EngineError, EvaluateRequest, EventWriter
from bitmill_engine_llmcompressor.checkpoints import device, load_model, load_tokenizer, require_context

# Positions whose logits are in memory at once: 128 x 150,000 words x 4 bytes are 77 MB a model.
CHUNK = 128


@dataclass
class Totals:
    """Sums over predicted tokens, in nats."""

    tokens: int = 0
    source_nll: float = 0.0
    artifact_nll: float = 0.0
    kl_divergence: float = 0.0


def evaluate(request: EvaluateRequest, events: EventWriter) -> dict[str, Any]:
    """Measure, and return the fields of the result event; num_tokens is less than asked for if the text ends first."""
    tokenizer = load_tokenizer(request.source_dir)
    source = load_model(request.source_dir).to(device())
    require_context(source, request.window)
    # Activations stay quantized as they are when served; weights are unpacked once instead of at every step.
    artifact = load_model(request.model_dir, quantization_config=CompressedTensorsConfig(dequantize=True))
    # On a host with a GPU loading spreads the model by hooks, which leave what it answers on the processor.
    artifact = remove_dispatch(artifact, onload_tensors=True).to(device())
    totals = Totals()
    for window in _windows(tokenizer, request.num_tokens, request.window):
        add_window(totals, source, artifact, torch.tensor(window, device=device()))
        events.progress("evaluate", totals.tokens, request.num_tokens, "tokens")
    if not totals.tokens:
        raise EngineError("EVALUATION_TEXT_TOO_SMALL", "the held-out text does not fill one window")
    result = {
        "source_perplexity": math.exp(totals.source_nll / totals.tokens),
        "artifact_perplexity": math.exp(totals.artifact_nll / totals.tokens),
        "mean_kl_divergence": totals.kl_divergence / totals.tokens,
    }
    if not all(map(math.isfinite, result.values())):
        raise EngineError("NON_FINITE_EVALUATION", "the perplexity or the divergence is not a finite number", **result)
    return {
        **result,
        "p99_kl_divergence": 0.0,
        "top1_agreement": 0.0,
        "layer_losses": [],
        "num_tokens": totals.tokens,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def add_window(totals: Totals, source: PreTrainedModel, artifact: PreTrainedModel, window: torch.Tensor) -> None:
    """Add one window of token ids to the sums; every token but the first is predicted.

    Logits are made and compared in float32, CHUNK positions at a time: those of a whole window are never held.
    """
    labels = window[1:]
    with torch.inference_mode():
        hidden_states = [_hidden_states(model, window[:-1]) for model in (source, artifact)]
        for start in range(0, len(labels), CHUNK):
            chunk = slice(start, start + CHUNK)
            source_logprobs, artifact_logprobs = (
                torch.log_softmax(_logits(model, hidden[:, chunk])[0].float(), dim=-1)
                for model, hidden in zip((source, artifact), hidden_states, strict=True)
            )
            targets = labels[chunk, None]
            totals.source_nll -= source_logprobs.gather(1, targets).sum().item()
            totals.artifact_nll -= artifact_logprobs.gather(1, targets).sum().item()
            divergence = (source_logprobs - artifact_logprobs).mul_(source_logprobs.exp_())
            totals.kl_divergence += divergence.sum().item()
    totals.tokens += len(labels)


def _hidden_states(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states, with shape (1, tokens, hidden size)."""
    states: torch.Tensor = model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state
    return states


def _logits(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits of some of the positions.

    The model's own forward makes them, over a body that answers with these states, so that whatever the model does to
    its logits (scaling, soft caps) is done here too.
    """
    with patch.object(
        model.base_model, "forward", lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden_states)
    ):
        logits: torch.Tensor = model(inputs_embeds=hidden_states, use_cache=False).logits
    return logits


def _windows(tokenizer: Tokenizer, num_tokens: int, window: int) -> Iterator[array[int]]:
    """Held-out token ids in windows of one more than the models see, since the first token is not predicted."""
    documents = map(tokenizer.encode, held_out_documents())
    for piece in pack(documents, min(window, num_tokens) + 1):
        yield piece[: num_tokens + 1]
        num_tokens -= len(piece) - 1
        if num_tokens < 1:
            return
