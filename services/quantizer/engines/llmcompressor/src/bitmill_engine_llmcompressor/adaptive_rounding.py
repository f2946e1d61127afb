"""Linear layers as an artifact would have them, rounded by their treatment's algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from unittest.mock import patch

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq import gptq_quantize
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian, update_batch_qparams
from llmcompressor.modifiers.quantization.calibration import (
    freeze_module_quantization,
    initialize_observer,
    observe,
    update_qparams,
)
from llmcompressor.observers import fuse_weight_observers

from bitmill_engine_kit.protocol import Treatment
from bitmill_engine_llmcompressor import damping, gptq_cpu
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


class Rounding:
    """Rounds layers as a recipe's artifact would have them.

    `dtype` is the artifact's: scales are rounded to it.
    """

    def __init__(self, activation_order: str, dampening_frac: float, dtype: torch.dtype) -> None:
        self._activation_order = activation_order
        self._dampening_frac = dampening_frac
        self._dtype = dtype

    def __call__(
        self,
        layers: Mapping[str, torch.nn.Linear],
        treatment: Treatment,
        statistics: Mapping[str, InputStatistics],
    ) -> dict[str, torch.nn.Linear]:
        """Copies that compute what the served layers will: weights rounded, and activations too where they are.

        GPTQ rounds a layer that has no statistics to nearest.
        """
        scheme = quantization_scheme(treatment, self._activation_order, [TARGET])
        copies = {name: deepcopy(layer).to(self._dtype) for name, layer in layers.items()}
        for copy in copies.values():
            initialize_module_for_quantization(copy, scheme.model_copy(deep=True))
            initialize_observer(copy, "weight")
        fuse_weight_observers(_tree(copies))
        for name, copy in copies.items():
            observe(copy, "weight")
            self._round(copy, treatment, statistics.get(name))
            freeze_module_quantization(copy)
        for name, copy in copies.items():
            # There and back through the artifact's own format: afterwards the weights are what is served.
            compress_module(copy)
            decompress_module(copy)
            copy.to(layers[name].weight.dtype)
        return copies

    def _round(self, layer: torch.nn.Linear, treatment: Treatment, statistics: InputStatistics | None) -> None:
        if treatment.algorithm == "GPTQ" and statistics is not None:
            self._round_by_gptq(layer, statistics)
        else:
            update_qparams(layer, "weight")
        inputs = layer.quantization_scheme.input_activations
        if statistics is not None and inputs is not None and not inputs.dynamic:
            scale, _ = calculate_qparams(statistics.low.reshape(1), statistics.high.reshape(1), inputs)
            layer.input_scale.data.copy_(scale)

    def _round_by_gptq(self, layer: torch.nn.Linear, statistics: InputStatistics) -> None:
        """As llm-compressor's GPTQModifier.compress_module_list, for one layer."""
        qparams, args = layer.weight_observer.get_qparams(), layer.quantization_scheme.weights
        scales, zero_points = qparams["scale"][None], qparams["zero_point"][None]
        with torch.no_grad(), patch.object(gptq_quantize, "factorize_hessian", _factorize):
            quantized, _, _ = gptq_quantize.quantize_weight(
                weights=layer.weight.detach().float()[None].clone(),
                hessians=(statistics.hessian / statistics.num_samples)[None],
                scale=scales,
                zero_point=zero_points,
                global_scale=None,
                quant_args=args,
                blocksize=gptq_cpu.BLOCK_SIZE,
                percdamp=self._dampening_frac,
            )
            update_batch_qparams([layer], quantized, scales, zero_points, None, args)


def _tree(layers: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """The layers below parents of their own, where those that share a scale are looked for."""
    parents: dict[str, torch.nn.Module] = {}
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        parents.setdefault(parent, torch.nn.Module()).add_module(leaf, layer)
    return torch.nn.ModuleList(parents.values())


def _factorize(
    weights: torch.Tensor, hessians: torch.Tensor, percdamp: float, used_rtn_fallback: torch.Tensor
) -> torch.Tensor:
    """llm-compressor's `factorize_hessian` with retries, as the artifact's layers are rounded."""
    damping.quiet_dead_channels(weights, hessians)
    for index, fraction in enumerate(damping.factorize(hessians, percdamp)):
        used_rtn_fallback[index] = fraction is None
    return hessians
