"""The factor of the inverse Hessian that GPTQ needs, with more damping where it is needed.

The arithmetic of the first attempt is that of llm-compressor's `factorize_hessian`, bit for bit.
"""

from __future__ import annotations

import torch
from llmcompressor.modifiers.gptq.helpers import MIN_BATCHED_CHOLESKY_SIZE

RETRIES = 3
FACTOR = 10.0
"""Each retry has so many times the damping of the one before."""


def quiet_dead_channels(weights: torch.Tensor, hessians: torch.Tensor) -> None:
    """Give channels that were never active a Hessian of one and weights of zero, in place.

    `weights`: (batch, rows, columns); `hessians`: (batch, columns, columns).
    """
    diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1)
    dead = diagonal == 0
    diagonal.masked_fill_(dead, 1.0)
    weights.masked_fill_(dead.unsqueeze(1), 0)


def factorize(hessians: torch.Tensor, dampening_frac: float) -> list[float | None]:
    """Replace Hessians by the upper Cholesky factors of their damped inverses, in place.

    `hessians`: float32, (batch, columns, columns), finite, without zeros on the diagonals. Returns for each the damping
    that was needed, as a fraction of the mean diagonal, or None when the last retry did not invert either: it is then
    the identity, with which GPTQ rounds to nearest.
    """
    batched = len(hessians) >= MIN_BATCHED_CHOLESKY_SIZE  # below it one after the other is faster
    inverted = _try_together(hessians, dampening_frac) if batched else [False] * len(hessians)
    return [
        dampening_frac if done else _factorize_one(hessian, dampening_frac)
        for done, hessian in zip(inverted, hessians, strict=True)
    ]


def _try_together(hessians: torch.Tensor, dampening_frac: float) -> list[bool]:
    """Factorize those that need no more damping; the others are left as they were."""
    originals = hessians.clone()
    diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1)
    diagonal.add_((dampening_frac * diagonal.mean(dim=-1)).unsqueeze(-1))
    inverted = _invert(hessians)
    bad = (~inverted).nonzero().flatten()
    hessians.index_copy_(0, bad, originals[bad])
    flags: list[bool] = inverted.tolist()
    return flags


def _factorize_one(hessian: torch.Tensor, dampening_frac: float) -> float | None:
    original = hessian.clone()
    mean = torch.mean(torch.diag(original))
    for attempt in range(RETRIES + 1):
        fraction = dampening_frac * FACTOR**attempt
        torch.diagonal(hessian).add_(fraction * mean)
        if bool(_invert(hessian)):
            return fraction
        hessian.copy_(original)
    hessian.copy_(torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device))
    return None


def _invert(matrices: torch.Tensor) -> torch.Tensor:
    """Put the upper Cholesky factors of the inverses in the place of matrices; whether each has one."""
    info = torch.empty(matrices.shape[:-2], dtype=torch.int32, device=matrices.device)
    torch.linalg.cholesky_ex(matrices, check_errors=False, out=(matrices, info))
    definite = info == 0
    matrices.masked_fill_(~definite[..., None, None], 0).diagonal(dim1=-2, dim2=-1).masked_fill_(
        ~definite[..., None], 1
    )
    torch.cholesky_inverse(matrices, out=matrices)
    torch.linalg.cholesky_ex(matrices, upper=True, check_errors=False, out=(matrices, info))
    return definite & (info == 0) & matrices.isfinite().flatten(-2).all(-1)
