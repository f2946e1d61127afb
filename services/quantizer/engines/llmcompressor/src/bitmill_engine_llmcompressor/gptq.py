"""llm-compressor's GPTQ as the plan has it: other layers rounded to nearest, each layer's outcome kept, progress told.

It accumulates one Hessian for layers that share an input, and damps more where one does not invert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.core import Event, State
from llmcompressor.modifiers.gptq import GPTQModifier, gptq_quantize
from llmcompressor.modifiers.gptq import base as gptq_base
from llmcompressor.modifiers.gptq.helpers import make_empty_hessian, prepare_batch
from llmcompressor.modifiers.quantization.calibration import observe, update_qparams
from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
from llmcompressor.observers import ACTIVATION_OBS
from llmcompressor.utils.metric_logging import CompressionLogger
from llmcompressor.utils.pytorch.module import infer_sequential_targets
from pydantic import PrivateAttr

from bitmill_engine_kit.plan import Plan
from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_llmcompressor import calibration_cuda, damping
from bitmill_engine_llmcompressor.rows import Outcome

OnLayer = Callable[[int, int, float | None, str], None]
"""Called at the start and after each decoder layer with layers done, layers in all, the mean loss of the modules of the
layer just done, and a remark."""

NOT_INVERTED = "rounded to nearest, since its Hessian did not invert with 1000 times the damping either"
MORE_DAMPING = "its Hessian inverted with more damping only"
NOT_REACHED = "rounded to nearest, since no calibration token reached it"


class PlanModifier(GPTQModifier):  # type: ignore[misc]
    """Rounds each layer as the plan says.

    Its config groups say how layers are stored, the plan which of them GPTQ rounds; the others are rounded to nearest.
    """

    _plan: Plan = PrivateAttr(default_factory=dict)
    # Names of the modules that GPTQ rounds.
    _gptq: dict[torch.nn.Module, str] = PrivateAttr(default_factory=dict)
    _on_layer: OnLayer = PrivateAttr()
    _layers: list[torch.nn.Module] = PrivateAttr(default_factory=list)
    _completed: int = PrivateAttr(default=0)
    _outcomes: dict[str, Outcome] = PrivateAttr(default_factory=dict)
    _losses: dict[torch.nn.Module, float] = PrivateAttr(default_factory=dict)
    _last_input: torch.Tensor | None = PrivateAttr(default=None)
    _last_module: torch.nn.Module | None = PrivateAttr(default=None)
    _leaders: dict[torch.nn.Module, torch.nn.Module] = PrivateAttr(default_factory=dict)
    # Hessians of which only the lower part is there yet.
    _lower: list[torch.Tensor] = PrivateAttr(default_factory=list)
    _batch: list[torch.nn.Module] = PrivateAttr(default_factory=list)

    def follow(self, plan: Plan, on_layer: OnLayer) -> PlanModifier:
        """Set the plan and the receiver of the reports."""
        self._plan, self._on_layer = plan, on_layer
        return self

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """What each layer that GPTQ was to round came to, by name."""
        return self._outcomes

    def resolve_quantization_config(self) -> QuantizationConfig:
        """The config groups as they are: each says its own activation order."""
        return QuantizationMixin.resolve_quantization_config(self)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the decoder layers, which llm-compressor calibrates one after the other."""
        classes = infer_sequential_targets(state.model, None)
        self._layers = [module for module in state.model.modules() if type(module).__name__ in classes]
        initialized = bool(super().on_initialize(state, **kwargs))
        self._on_layer(0, len(self._layers), None, "")
        return initialized

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Attach observers to all layers, and what accumulates Hessians to those that GPTQ rounds."""
        QuantizationMixin.start_calibration(self, state.model)
        planned = ((self._plan.get(name), name, module) for name, module in state.model.named_modules())
        self._gptq = {module: name for layer, name, module in planned if layer and layer.treatment.algorithm == "GPTQ"}
        for module in self._gptq:
            self.register_hook(module, self.calibrate_module, "forward")

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
            raise RuntimeError(f"{self._gptq[module]} no longer reads the input it shared in the first batch")

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

    def divide_inputs(self, modules: Iterable[torch.nn.Module], scales: torch.Tensor) -> None:
        """Make the Hessians of these modules those of their inputs divided by `scales`, one for each channel.

        SmoothQuant divides them so after they were seen: each entry of a Hessian is a product of two channels.
        """
        scaled: list[torch.Tensor] = []
        for hessian in (self._hessians[module] for module in modules if module in self._hessians):
            if not any(hessian is one for one in scaled):
                factors = scales.to(hessian)
                hessian.div_(factors[:, None]).div_(factors[None, :])
                scaled.append(hessian)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: list[torch.nn.Module], **kwargs: Any
    ) -> None:
        """Round what has been calibrated, and report each decoder layer among it; without data that is all at once."""
        for part, finished in self._by_layer(modules):
            self._round([module for module in part if is_module_quantized(module)])
            if finished:
                self._completed += 1
                self._on_layer(self._completed, len(self._layers), self._mean_loss(), "; ".join(self._remarks()))
                self._losses.clear()

    def _by_layer(self, modules: list[torch.nn.Module]) -> Iterator[tuple[list[torch.nn.Module], bool]]:
        """The modules in parts of one decoder layer each, then the rest."""
        rest = dict.fromkeys(modules)
        for layer in (layer for layer in self._layers if layer in rest):
            inside = [module for module in layer.modules() if module in rest]
            for module in inside:
                del rest[module]
            yield inside, True
        yield list(rest), False

    def _round(self, modules: list[torch.nn.Module]) -> None:
        observe(modules, base_name="weight")
        update_qparams(modules, ACTIVATION_OBS)
        calibrated = [module for module in modules if module in self._num_samples]
        others = [module for module in modules if module not in self._num_samples]
        self.compress_module_list(calibrated)
        update_qparams(others, "weight")
        for name in (self._gptq[module] for module in others if module in self._gptq):
            self._outcomes[name] = Outcome(remark=NOT_REACHED)

    def compress_module_list(self, module_list: list[torch.nn.Module]) -> None:
        """Round the modules' weights by GPTQ and keep the losses.

        Raises EngineError NON_FINITE_ACTIVATIONS when the inputs of a module were not finite.
        """
        self._last_input, self._last_module = None, None
        self._leaders.clear()
        for hessian in self._lower:
            calibration_cuda.mirror_lower(hessian)
        self._lower.clear()
        for module in module_list:
            self._require_finite(module)
        with (
            patch.object(gptq_base, "CompressionLogger", partial(_LossKeeper, self._losses)),
            patch.object(gptq_base, "prepare_batch", self._prepare_batch),
            patch.object(gptq_quantize, "factorize_hessian", self._factorize),
        ):
            super().compress_module_list(module_list)
        for module in module_list:
            name = self._gptq[module]
            known = self._outcomes.get(name, Outcome())
            self._outcomes[name] = Outcome(self._losses.get(module), known.dampening_frac, known.remark)

    def _require_finite(self, module: torch.nn.Module) -> None:
        if not self._hessians[module].isfinite().all():
            name = self._gptq[module]
            message = f"the inputs of {name} were not finite numbers while it was calibrated"
            raise EngineError("NON_FINITE_ACTIVATIONS", message, tensor=name)

    def _prepare_batch(self, batch: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        self._batch = batch
        return prepare_batch(batch, *args, **kwargs)

    def _factorize(
        self, weights: torch.Tensor, hessians: torch.Tensor, percdamp: float, used_rtn_fallback: torch.Tensor
    ) -> torch.Tensor:
        """llm-compressor's `factorize_hessian`, with retries."""
        damping.quiet_dead_channels(weights, hessians)
        for index, fraction in enumerate(damping.factorize(hessians, percdamp)):
            name = self._gptq[self._batch[index]]
            if fraction is None:
                used_rtn_fallback[index] = True
                self._outcomes[name] = Outcome(remark=NOT_INVERTED)
            elif fraction != percdamp:
                self._outcomes[name] = Outcome(dampening_frac=fraction, remark=MORE_DAMPING)
        return hessians

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Round what no batch of calibration reached, and detach everything."""
        self._round([module for module, name in self._gptq.items() if name not in self._outcomes])
        super().on_calibration_end(state, event, **kwargs)

    def _mean_loss(self) -> float | None:
        return sum(self._losses.values()) / len(self._losses) if self._losses else None

    def _remarks(self) -> Iterator[str]:
        """What befell the modules of the layer just done."""
        for name in (self._gptq[module] for module in self._losses):
            if remark := self._outcomes[name].remark:
                yield f"{name}: {remark}"


class _LossKeeper(CompressionLogger):  # type: ignore[misc]
    """The place where llm-compressor says a module's loss, kept as a number."""

    def __init__(self, losses: dict[torch.nn.Module, float], module: torch.nn.Module) -> None:
        super().__init__(module)
        self._kept = losses

    def set_results(self, name: str | None = None, loss: float | None = None) -> None:
        super().set_results(name, loss)
        if loss is not None:
            self._kept[self.module] = loss
