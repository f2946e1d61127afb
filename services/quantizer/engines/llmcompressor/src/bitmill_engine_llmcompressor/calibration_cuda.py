"""What makes calibration fast on CUDA: 16-bit Hessians, fused attention, and batches as large as the memory allows.

Everything here computes what llm-compressor computes; `benchmarks/quantization_speed.py` measures both in one run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MAX_BATCH_SIZE = 32
"""The batch that was measured: on an H200 it keeps the device busy all the time."""
# Left to the weights of the layer at hand, the Hessians' factorization and the allocator.
USABLE_FRACTION = 0.6
# Hessians are symmetric: only blocks on and below the diagonal are computed, in strips this wide.
_STRIP = 4096
_EAGER = "eager"


@dataclass(frozen=True)
class BatchPlan:
    """How calibration runs: samples in a batch, the device that keeps activations between layers, which attention."""

    batch_size: int
    offload_device: str
    fused_attention: bool


def plan_batches(config: PreTrainedConfig, num_samples: int, length: int, free_bytes: int) -> BatchPlan:
    """Choose the largest batch, and the device for the activations if they fit it, from `free_bytes` of the GPU.

    `length`: tokens in a sample. Sizes are those of 16-bit activations: between layers each sample keeps its hidden
    states twice, before and after the layer, and its causal mask; a batch in a layer keeps about eight tensors of the
    hidden size and four of the intermediate size.
    """
    text = config.get_text_config()
    hidden, intermediate = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    kept = 2 * length * (2 * hidden + length)
    working = 2 * length * (8 * hidden + 4 * intermediate + 2 * length)
    usable = int(free_bytes * USABLE_FRACTION)
    on_device = kept * num_samples + working <= usable
    room = usable - kept * num_samples if on_device else usable
    batch_size = min(MAX_BATCH_SIZE, num_samples)
    while batch_size > 1 and batch_size * working > room:
        batch_size //= 2
    return BatchPlan(batch_size, "cuda" if on_device else "cpu", fused_attention=True)


def accumulate_lower(inputs: torch.Tensor, hessian: torch.Tensor) -> None:
    """Add 2 * inputs^T @ inputs to the blocks of `hessian` on and below its diagonal.

    `inputs`: 16-bit, (..., columns), on CUDA. `hessian`: float32, (columns, columns). A product of two 16-bit numbers
    is exact in float32, and the sums are float32, so this is the float32 product at the speed of 16-bit matrix units.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    columns = rows.shape[1]
    for start in range(0, columns, _STRIP):
        end = min(start + _STRIP, columns)
        strip = torch.mm(rows[:, start:end].t(), rows[:, :end], out_dtype=torch.float32)
        hessian[start:end, :end].add_(strip, alpha=2)


def mirror_lower(hessian: torch.Tensor) -> None:
    """Fill a symmetric matrix from the part on and below its diagonal, in place."""
    hessian.tril_()
    hessian.add_(hessian.tril(-1).t())


def is_fast_input(inputs: torch.Tensor) -> bool:
    """Whether `accumulate_lower` takes these inputs."""
    return inputs.device.type == "cuda" and inputs.dtype in (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def fused_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the eager attention that llm-compressor forces be PyTorch's fused one.

    Its traced graph needs the mask that eager attention takes. A mask that is plainly causal is left out, so that the
    fused kernel, which never builds the scores, may run; any other is passed on.
    """
    causal: dict[tuple[int, ...], torch.Tensor] = {}

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None and _is_causal(attention_mask, causal):
            attention_mask = None
        outputs: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return outputs

    if not _takes_plain_attention(model):
        yield
        return
    ALL_ATTENTION_FUNCTIONS[_EAGER] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_EAGER]


def _takes_plain_attention(model: PreTrainedModel) -> bool:
    """Whether fused attention computes the same: it knows no soft cap of the scores, as Gemma 2 has."""
    return model._supports_sdpa and not getattr(model.config.get_text_config(), "attn_logit_softcapping", None)


def _is_causal(mask: torch.Tensor, known: dict[tuple[int, ...], torch.Tensor]) -> bool:
    size = tuple(mask.shape[-2:])
    if size not in known:
        known[size] = torch.ones(size, dtype=torch.bool, device=mask.device).triu(1)
    return bool(torch.equal(mask < 0, known[size].expand_as(mask)))
