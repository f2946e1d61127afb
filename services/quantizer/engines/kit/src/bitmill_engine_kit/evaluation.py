"""How far an artifact is from its source, measured on text that no engine calibrates with.

The only module of the kit that imports torch. It takes the models as the engine has loaded them, on whatever device,
and works with every transformers from 4.49 on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from bitmill_engine_kit.builtin_text import held_out_documents
from bitmill_engine_kit.calibration import pack
from bitmill_engine_kit.documents import Tokenizer
from bitmill_engine_kit.process import peak_memory_bytes
from bitmill_engine_kit.protocol import EngineError, EvaluateRequest

Model = Any
"""A transformers PreTrainedModel with a head for causal language modelling."""

CHUNK = 128
"""Positions whose logits are in memory at once: 128 x 150,000 words x 12 bytes are 230 MB a model."""
TAIL = 0.99
"""The quantile of the divergence that is told beside its mean."""


@dataclass
class Measurements:
    """What the windows gave so far; likelihoods and divergences in nats."""

    source_nll: float = 0.0
    artifact_nll: float = 0.0
    agreements: int = 0
    """Tokens for which both models think the same next one the most likely."""
    divergences: list[torch.Tensor] = field(default_factory=list)
    """KL(source || artifact) of every predicted token, float32 on the host: 4 bytes a token keep the quantile exact."""
    layer_errors: dict[str, float] = field(default_factory=dict)
    """By decoder layer: sum of squares of the difference of the two models' outputs."""
    layer_squares: dict[str, float] = field(default_factory=dict)
    """By decoder layer: sum of squares of the source's output."""

    @property
    def num_tokens(self) -> int:
        """Tokens predicted."""
        return sum(map(len, self.divergences))


def evaluate(
    source: Model, artifact: Model, tokenizer: Tokenizer, request: EvaluateRequest, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Measure, and return the fields of the result event; num_tokens is less than asked for if the text ends first.

    `progress` is told after each window how many tokens are predicted so far. Raises EngineError
    EVALUATION_TEXT_TOO_SMALL and, for what is not a finite number, NON_FINITE_EVALUATION.
    """
    measurements = Measurements()
    for window in held_out_windows(tokenizer, request.num_tokens, request.window):
        add_window(measurements, source, artifact, torch.tensor(window))
        progress(measurements.num_tokens)
    if not measurements.divergences:
        raise EngineError("EVALUATION_TEXT_TOO_SMALL", "the held-out text does not fill one window")
    return {
        **_numbers(measurements),
        "layer_losses": _layer_losses(measurements),
        "num_tokens": measurements.num_tokens,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }


def held_out_windows(tokenizer: Tokenizer, num_tokens: int, window: int) -> Iterator[array[int]]:
    """Held-out token ids in windows of one more than the models see, since the first token is not predicted."""
    documents = map(tokenizer.encode, held_out_documents())
    for piece in pack(documents, min(window, num_tokens) + 1):
        yield piece[: num_tokens + 1]
        num_tokens -= len(piece) - 1
        if num_tokens < 1:
            return


def add_window(measurements: Measurements, source: Model, artifact: Model, window: torch.Tensor) -> None:
    """Add one window of token ids; every token but the first is predicted.

    Logits are made CHUNK positions at a time, so that those of a whole window are never held; distributions are
    compared in float64. The outputs of all the source's decoder layers for the window are held: a hundredth of a large
    model's weights.
    """
    with torch.inference_mode():
        outputs: dict[str, torch.Tensor] = {}
        source_body = _run_body(source, window[:-1], outputs.__setitem__)
        artifact_body = _run_body(
            artifact, window[:-1], lambda name, output: _add_layer(measurements, name, outputs.pop(name), output)
        )
        for start in range(0, len(window) - 1, CHUNK):
            chunk = slice(start, start + CHUNK)
            logprobs = log_probabilities(source, source_body, chunk)
            targets = window[1:][chunk].to(logprobs.device)
            _add_predictions(measurements, logprobs, log_probabilities(artifact, artifact_body, chunk), targets)


def _add_layer(measurements: Measurements, name: str, source: torch.Tensor, artifact: torch.Tensor) -> None:
    expected = source.float()
    error = (artifact.to(source.device).float() - expected).square_().sum(dtype=torch.float64).item()
    square = expected.square().sum(dtype=torch.float64).item()
    measurements.layer_errors[name] = measurements.layer_errors.get(name, 0.0) + error
    measurements.layer_squares[name] = measurements.layer_squares.get(name, 0.0) + square


def _add_predictions(
    measurements: Measurements, source: torch.Tensor, artifact: torch.Tensor, targets: torch.Tensor
) -> None:
    """Add log-probabilities of shape (positions, vocabulary) and the tokens that really came."""
    measurements.agreements += int((source.argmax(dim=-1) == artifact.to(source.device).argmax(dim=-1)).sum().item())
    # What float32 rounds the two normalizers by would be as large as the divergence of an 8-bit artifact.
    source, artifact = (torch.log_softmax(each.to(targets.device).double(), dim=-1) for each in (source, artifact))
    measurements.source_nll -= source.gather(1, targets[:, None]).sum().item()
    measurements.artifact_nll -= artifact.gather(1, targets[:, None]).sum().item()
    divergence = torch.sub(source, artifact, out=artifact).mul_(source.exp_()).sum(dim=-1).float()
    # No divergence is negative but by rounding.
    measurements.divergences.append(divergence.clamp_(min=0).cpu())


def _run_body(model: Model, token_ids: torch.Tensor, see: Callable[[str, torch.Tensor], None]) -> Any:
    """Run the model without its head; `see` gets each decoder layer's name and output, (1, tokens, hidden size)."""

    def hook(name: str) -> Callable[..., None]:
        # A decoder layer returns its output, or a tuple that begins with it.
        return lambda _module, _inputs, output: see(name, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for name, layer in decoder_layers(model).items():
            hooks.callback(layer.register_forward_hook(hook(name)).remove)
        return model.base_model(input_ids=token_ids[None].to(model.device), use_cache=False)


def decoder_layers(model: Model) -> dict[str, torch.nn.Module]:
    """The decoder layers by their names in the model: the outermost list of as many modules as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return {f"{name}.{index}": layer for index, layer in enumerate(module)}
    raise EngineError("ENGINE_ERROR", f"the model has no list of {count} decoder layers", num_hidden_layers=count)


def log_probabilities(model: Model, body: Any, chunk: slice) -> torch.Tensor:
    """Log-probabilities of some of the positions, float32, (positions, vocabulary).

    The model's own forward makes the logits, over a body that answers with these states, so that whatever the model
    does to its logits (scaling, soft caps) is done here too.
    """
    states = body.last_hidden_state[:, chunk]
    answer = type(body)(last_hidden_state=states)
    with patch.object(model.base_model, "forward", lambda *_, **__: answer):
        logits = model(inputs_embeds=states, use_cache=False).logits
    return torch.log_softmax(logits[0].float(), dim=-1)


def _numbers(measurements: Measurements) -> dict[str, float]:
    """Perplexities, divergences and agreement over all tokens."""
    divergences = torch.cat(measurements.divergences).double()
    count = len(divergences)
    result = {
        "source_perplexity": _exp(measurements.source_nll / count),
        "artifact_perplexity": _exp(measurements.artifact_nll / count),
        "mean_kl_divergence": divergences.mean().item(),
        "p99_kl_divergence": quantile(divergences, TAIL),
        "top1_agreement": measurements.agreements / count,
    }
    if not all(map(math.isfinite, result.values())):
        raise EngineError("NON_FINITE_EVALUATION", "the perplexity or the divergence is not a finite number", **result)
    return result


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(1e300) else math.inf


def quantile(values: torch.Tensor, fraction: float) -> float:
    """The quantile between the two nearest values, as NumPy's default has it; torch.quantile takes 16 million only."""
    position = (len(values) - 1) * fraction
    low = math.floor(position)
    ordered = values.sort().values[low : low + 2].tolist()
    return float(ordered[0] + (ordered[-1] - ordered[0]) * (position - low))


def _layer_losses(measurements: Measurements) -> list[dict[str, Any]]:
    """Rows of the relative error of each decoder layer's output, in the model's order."""
    rows = []
    for name, error in measurements.layer_errors.items():
        square = measurements.layer_squares[name]
        relative = error / square if square else math.inf if error else 0.0
        if not math.isfinite(relative):
            raise EngineError("NON_FINITE_EVALUATION", f"the output of {name} is not finite", layer=name)
        rows.append({"layer": name, "relative_error": relative})
    return rows
