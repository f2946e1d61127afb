"""llm-compressor's GPTQ with three additions: progress by layer, the loss of each, and one Hessian per input."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq import base as gptq_base
from llmcompressor.modifiers.gptq.helpers import make_empty_hessian
from llmcompressor.utils.metric_logging import CompressionLogger
from llmcompressor.utils.pytorch.module import infer_sequential_targets
from pydantic import PrivateAttr

from bitmill_engine_llmcompressor import calibration_cuda

OnLayer = Callable[[int, int, float | None, str], None]
"""Called at the start and after each decoder layer with layers done, layers in all, the mean loss of the modules of the
layer just done, and a remark."""


class ReportingGPTQModifier(GPTQModifier):  # type: ignore[misc]
    """GPTQ that reports each finished decoder layer and accumulates the Hessian of a shared input once."""

    _on_layer: OnLayer = PrivateAttr()
    _layers: set[torch.nn.Module] = PrivateAttr(default_factory=set)
    _completed: int = PrivateAttr(default=0)
    _losses: list[float] = PrivateAttr(default_factory=list)
    _last_input: torch.Tensor | None = PrivateAttr(default=None)
    _last_module: torch.nn.Module | None = PrivateAttr(default=None)
    _leaders: dict[torch.nn.Module, torch.nn.Module] = PrivateAttr(default_factory=dict)
    # Hessians of which only the lower part is there yet.
    _lower: list[torch.Tensor] = PrivateAttr(default_factory=list)

    def report_to(self, on_layer: OnLayer) -> "ReportingGPTQModifier":
        """Set the receiver of the reports."""
        self._on_layer = on_layer
        return self

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the decoder layers, which llm-compressor calibrates one after the other."""
        classes = infer_sequential_targets(state.model, None)
        self._layers = {module for module in state.model.modules() if type(module).__name__ in classes}
        initialized = bool(super().on_initialize(state, **kwargs))
        self._on_layer(0, len(self._layers), None, "")
        return initialized

    def calibrate_module(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Accumulate the Hessian of a module's input.

        Query, key and value projections read one tensor, as do gate and up: their Hessians are equal, so the first
        of them accumulates it and the others share it.
        """
        if module not in self._num_samples and args[0] is self._last_input:
            self._leaders[module] = self._last_module
            self._hessians[module] = self._hessians[self._last_module]
            self._num_samples[module] = self._num_samples[self._last_module]
        if (leader := self._leaders.get(module)) is None:
            self._last_input, self._last_module = args[0], module
            self._accumulate(module, args, output)
        elif leader is not self._last_module or args[0] is not self._last_input:
            raise RuntimeError(f"{self._module_names[module]} no longer reads the input it shared in the first batch")

    def _accumulate(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        inputs = args[0]
        if not calibration_cuda.is_fast_input(inputs):
            super().calibrate_module(module, args, output)
            return
        if module not in self._num_samples:
            self._hessians[module] = make_empty_hessian(module, device=inputs.device)
            self._num_samples[module] = torch.zeros((), device=inputs.device)
            self._lower.append(self._hessians[module])
        calibration_cuda.accumulate_lower(inputs, self._hessians[module])
        self._num_samples[module] += inputs.shape[0] if inputs.dim() > 2 else 1

    def compress_module_list(self, module_list: list[torch.nn.Module]) -> None:
        """Round the modules' weights and keep the losses."""
        self._last_input, self._last_module = None, None
        self._leaders.clear()
        for hessian in self._lower:
            calibration_cuda.mirror_lower(hessian)
        self._lower.clear()
        with patch.object(gptq_base, "CompressionLogger", partial(_LossKeeper, self._losses)):
            super().compress_module_list(module_list)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: list[torch.nn.Module], **kwargs: Any
    ) -> None:
        """Round what has been calibrated, and report when a decoder layer was among it."""
        super().on_sequential_epoch_end(state, event, modules, **kwargs)
        if finished := len(self._layers.intersection(modules)):
            self._completed += finished
            loss = sum(self._losses) / len(self._losses) if self._losses else None
            fallbacks = ", ".join(self._rtn_fallback_module_names)
            remark = f"rounded to nearest, for want of an invertible Hessian: {fallbacks}" if fallbacks else ""
            self._on_layer(self._completed, len(self._layers), loss, remark)
            self._losses.clear()
            self._rtn_fallback_module_names.clear()


class _LossKeeper(CompressionLogger):  # type: ignore[misc]
    """The place where llm-compressor says a module's loss, kept as a number."""

    def __init__(self, losses: list[float], module: torch.nn.Module) -> None:
        super().__init__(module)
        self._kept = losses

    def set_results(self, name: str | None = None, loss: float | None = None) -> None:
        super().set_results(name, loss)
        if loss is not None:
            self._kept.append(loss)
