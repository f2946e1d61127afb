"""One Linear layer as an artifact would have it, rounded by its treatment's algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian, update_batch_qparams
from llmcompressor.modifiers.quantization.calibration import (
    freeze_module_quantization,
    initialize_observer,
    observe,
    update_qparams,
)

from bitmill_engine_kit.protocol import Treatment
from bitmill_engine_llmcompressor import gptq_cpu
from bitmill_engine_llmcompressor.recipes import TARGET, quantization_scheme


@dataclass
class InputStatistics:
    """What a Linear layer reads: its GPTQ Hessian, and the extremes of its inputs."""

    hessian: torch.Tensor
    """2 * inputs^T @ inputs, summed over samples; float32, (input channels, input channels)."""
    num_samples: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


class InputRecorder:
    """Collects the statistics of Linear layers while the context is open.

    Query, key and value projections read one tensor, as do gate and up: those share what the first of them collects.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Linear]) -> None:
        self.statistics: dict[str, InputStatistics] = {}
        """By name; a layer that nothing went through, an expert for example, has none."""
        self._layers = layers
        self._last: tuple[torch.Tensor, InputStatistics] | None = None
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> InputRecorder:
        for name, layer in self._layers.items():
            hook = layer.register_forward_pre_hook(lambda module, args, name=name: self._record(name, module, args[0]))
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._last = None

    def _record(self, name: str, layer: torch.nn.Linear, inputs: torch.Tensor) -> None:
        if inputs.numel() == 0:
            return
        if self._last is not None and self._last[0] is inputs:
            self.statistics[name] = self._last[1]
            return
        found = self.statistics.get(name)
        if found is None:
            hessian = make_empty_hessian(layer, device=inputs.device)
            zero = torch.zeros((), device=inputs.device)
            found = self.statistics[name] = InputStatistics(hessian, zero.clone(), zero.clone(), zero.clone())
        accumulate_hessian(inputs, layer, found.hessian, found.num_samples)
        found.low = torch.minimum(found.low, inputs.amin().float())
        found.high = torch.maximum(found.high, inputs.amax().float())
        self._last = (inputs, found)


def rounded(
    layer: torch.nn.Linear,
    treatment: Treatment,
    activation_order: str,
    dampening_frac: float,
    statistics: InputStatistics | None,
    dtype: torch.dtype,
) -> torch.nn.Linear:
    """A copy of a layer that computes what the served one will: weights rounded, activations too where they are.

    `dtype` is the artifact's: scales are rounded to it. GPTQ without statistics rounds to nearest.
    """
    copy = deepcopy(layer).to(dtype)
    scheme = quantization_scheme(treatment, activation_order, [TARGET])
    initialize_module_for_quantization(copy, scheme)
    initialize_observer(copy, "weight")
    observe(copy, "weight")
    if treatment.algorithm == "GPTQ" and statistics is not None:
        _round_by_gptq(copy, scheme, dampening_frac, statistics)
    else:
        update_qparams(copy, "weight")
    if (inputs := scheme.input_activations) is not None and not inputs.dynamic:
        low, high = (statistics.low, statistics.high) if statistics else (torch.zeros(()), torch.ones(()))
        scale, _ = calculate_qparams(low.reshape(1), high.reshape(1), inputs)
        copy.input_scale.data.copy_(scale)
    freeze_module_quantization(copy)
    # There and back through the artifact's own format: afterwards the weights are what is served, and stay as they are.
    compress_module(copy)
    decompress_module(copy)
    return copy.to(layer.weight.dtype)


def _round_by_gptq(
    layer: torch.nn.Linear, scheme: QuantizationScheme, dampening_frac: float, statistics: InputStatistics
) -> None:
    """As llm-compressor's GPTQModifier.compress_module_list, for one layer."""
    qparams = layer.weight_observer.get_qparams()
    scales, zero_points = qparams["scale"][None], qparams["zero_point"][None]
    with torch.no_grad():
        quantized, _, _ = quantize_weight(
            weights=layer.weight.detach().float()[None].clone(),
            hessians=(statistics.hessian / statistics.num_samples)[None],
            scale=scales,
            zero_point=zero_points,
            global_scale=None,
            quant_args=scheme.weights,
            blocksize=gptq_cpu.BLOCK_SIZE,
            percdamp=dampening_frac,
        )
        update_batch_qparams([layer], quantized, scales, zero_points, None, scheme.weights)
