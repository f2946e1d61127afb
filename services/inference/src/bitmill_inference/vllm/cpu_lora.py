"""Corrects vLLM's adapters on the CPU: a request of the model itself gets no adapter, whatever shares its batch.

vLLM marks such tokens with the index -1. Its kernels for GPUs pass over them; its PyTorch functions for the CPU take
the last adapter for them instead (vLLM 0.32, vllm/lora/ops/torch_ops/lora_ops.py; pull request 48421 of vLLM has it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform

_FUNCTIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
_CORRECTED = "bitmill_corrected"


def apply() -> None:
    """Puts the corrected functions in place in this process, on the CPU. A second time does nothing."""
    if not current_platform.is_cpu():
        return
    for name in _FUNCTIONS:
        function = getattr(lora_ops, name)
        if not hasattr(function, _CORRECTED):
            corrected = _passing_over(function)
            setattr(corrected, _CORRECTED, True)
            setattr(lora_ops, name, corrected)
            setattr(punica_cpu, name, corrected)


def _passing_over(function: Callable[..., None]) -> Callable[..., None]:
    """Calls a function for the rows that have an adapter alone; the outputs of the others stay as they are."""

    @functools.wraps(function)
    def corrected(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        indices: torch.Tensor,
        *rest: object,
        **named: object,
    ) -> None:
        rows = indices >= 0
        if bool(rows.all()):
            function(inputs, weights, outputs, indices, *rest, **named)
        elif bool(rows.any()):
            chosen = outputs[rows]
            function(inputs[rows], weights, chosen, indices[rows], *rest, **named)
            outputs[rows] = chosen

    return corrected
