"""More damping for a Hessian that does not invert. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from bitmill_engine_kit.protocol import EngineError

T = TypeVar("T")

RETRIES = 3
FACTOR = 10
"""Each retry has so many times the damping of the one before."""


def damped(hessian: torch.Tensor, dampening_frac: float, name: str, work: Callable[[float], T]) -> tuple[T, float]:
    """Do `work` with the damping asked for, then with ten times as much, three times at most; returns what sufficed.

    `work` raises torch.linalg.LinAlgError for a Hessian that does not invert.
    Raises EngineError NON_FINITE_ACTIVATIONS or HESSIAN_NOT_INVERTIBLE, naming the layer.
    """
    if not hessian.isfinite().all():
        message = f"the calibration inputs of {name} hold a NaN or an infinity"
        raise EngineError("NON_FINITE_ACTIVATIONS", message, tensor=name)
    tried = [dampening_frac * FACTOR**retry for retry in range(RETRIES + 1)]
    for damping in tried:
        try:
            return work(damping), damping
        except torch.linalg.LinAlgError:
            continue
    message = f"the Hessian of {name} does not invert, even damped with {tried[-1]} of its mean diagonal"
    raise EngineError("HESSIAN_NOT_INVERTIBLE", message, tensor=name, dampening_frac=tried[-1])
