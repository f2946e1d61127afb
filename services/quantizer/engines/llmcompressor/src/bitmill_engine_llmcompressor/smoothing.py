"""SmoothQuant and AWQ: channels are scaled before they are rounded, in the matrix that reads them and what feeds it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from llmcompressor.core import Event, State
from llmcompressor.modeling import offset_norm
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import AWQMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import MINIMUM_SMOOTHING_SCALE
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from transformers import PreTrainedModel

from bitmill_engine_kit.plan import Plan
from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_llmcompressor import smoothing_mappings

OnScales = Callable[[list[torch.nn.Module], torch.Tensor], None]
"""Called with modules and the factors, one for each channel, by which their inputs have just been divided."""


class SmoothQuant(SmoothQuantModifier):  # type: ignore[misc]
    """llm-compressor's SmoothQuant, which tells the scales, and leaves alone a channel that was never active."""

    _on_scales: OnScales = PrivateAttr()

    def tell(self, on_scales: OnScales) -> SmoothQuant:
        """Set the receiver of the scales."""
        self._on_scales = on_scales
        return self

    def _calculate_smoothing_scales(
        self, balance_layers: list[torch.nn.Module], activation_scales: torch.Tensor
    ) -> torch.Tensor:
        if not activation_scales.isfinite().all():
            smooth = next(each for each in self.resolved_mappings_ if each.balance_layers is balance_layers)
            raise _non_finite(smooth.smooth_name)
        scales = super()._calculate_smoothing_scales(balance_layers, activation_scales)
        scales = scales.clamp(min=MINIMUM_SMOOTHING_SCALE).where(activation_scales > 0, torch.ones_like(scales))
        self._on_scales(balance_layers, scales)
        return scales


class AWQ(AWQModifier):  # type: ignore[misc]
    """llm-compressor's AWQ, which takes activations that are not finite for the error that they are."""

    def on_sequential_epoch_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Search the best scales of the layers just calibrated, and apply them."""
        for name, (total, _) in self._smooth_activation_stats.items():
            if not total.isfinite().all():
                raise _non_finite(name)
        with _pinning_where_it_can():
            super().on_sequential_epoch_end(state, event, **kwargs)


def _pinning_where_it_can() -> contextlib.AbstractContextManager[object]:
    """llm-compressor 0.14 pins memory for its transfers to a GPU, and fails where there is none."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return patch.object(IntermediatesCache, "pin_memory", lambda *_: None)


def _non_finite(name: str) -> EngineError:
    message = f"the outputs of {name} were not finite numbers while it was calibrated"
    return EngineError("NON_FINITE_ACTIVATIONS", message, tensor=name)


def smoothquant(model: PreTrainedModel, plan: Plan, strength: float) -> SmoothQuant:
    """SmoothQuant for the layers of the plan that are W8A8_INT8.

    Raises EngineError UNSUPPORTED_RECIPE when it is not known what reads what in such a model.
    """
    readings = smoothing_mappings.smoothquant(model, plan)
    return SmoothQuant(
        smoothing_strength=strength, mappings=[(list(reading.readers), reading.smooth) for reading in readings]
    )


def awq(model: PreTrainedModel, plan: Plan, offload_device: str) -> AWQ:
    """AWQ for the layers of the plan that it scales; `offload_device` keeps the activations that it searches with.

    Raises EngineError UNSUPPORTED_RECIPE when it is not known what reads what in such a model.
    """
    readings = smoothing_mappings.awq(model, plan)
    return AWQ(
        mappings=[AWQMapping(reading.smooth, list(reading.readers), reading.hooked) for reading in readings],
        offload_device=torch.device(offload_device),
    )


@contextlib.contextmanager
def exact_norms(*, smoothing: bool) -> Iterator[None]:
    """Keep the norms of models whose norms scale by one plus their weight, as Gemma's do, as exact as they are.

    While it works, llm-compressor 0.14 holds that sum in the weight's 16 bits, which loses most of a small weight's
    digits. Here the sum is in 32 bits, and is made only when something is to be smoothed.
    """
    if not smoothing:
        # By its name: the package has a function of the same one.
        oneshot = importlib.import_module("llmcompressor.entrypoints.oneshot")
        with patch.object(oneshot, "norm_calibration_context", contextlib.nullcontext):
            yield
        return
    in_16_bits = offset_norm.CalibrationOffsetNorm.__init__

    def in_32_bits(norm: Any, original: torch.nn.Module, config: Any) -> None:
        in_16_bits(norm, original, config)
        norm.weight = torch.nn.Parameter(1.0 + original.weight.data.float())

    with patch.object(offset_norm.CalibrationOffsetNorm, "__init__", in_32_bits):
        yield
