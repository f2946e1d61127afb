"""AutoGPTQ's rounding of a layer, with the loss, which it only logs, and damping that grows where it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from auto_gptq.modeling import _base
from auto_gptq.quantization import GPTQ

from bitmill_engine_kit.damping import damped
from bitmill_engine_kit.rounding import RoundingReport


class ReportingGPTQ(GPTQ):  # type: ignore[misc]
    """`fasterquant` retries with more damping, and adds its loss to the report."""

    report: RoundingReport
    names: dict[torch.nn.Module, str]
    H: torch.Tensor

    def fasterquant(self, percdamp: float = 0.01, **options: Any) -> Any:
        """Round the layer's weight in place; returns scales, zero points and group indices.

        The loss is half of trace(E H E^T), with E the change of the weight and H = 2 / samples * X X^T: the squared
        error of the layer's output per sample (GPTQ, https://arxiv.org/abs/2210.17323, equation 1).
        """
        name = self.names[self.layer]
        hessian, weight = self.H, self.layer.weight.data

        def work(damping: float) -> Any:
            self.H, self.layer.weight.data = hessian.clone(), weight.clone()
            answer = super(ReportingGPTQ, self).fasterquant(percdamp=damping, **options)
            if not self.layer.weight.data.isfinite().all():
                raise torch.linalg.LinAlgError("the factor of the inverse Hessian is not finite")
            return answer

        answer, damping = damped(hessian, percdamp, name, work)
        error = weight.float() - self.layer.weight.data.float()
        self.report.add(name, ((error @ hessian) * error).sum().item() / 2, damping)
        return answer


@contextmanager
def reporting(report: RoundingReport, targets: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Within it AutoGPTQ rounds no layer but `targets`, by name, and reports each."""
    found = set(targets.values())
    find_layers = _base.find_layers

    def find_targets(module: torch.nn.Module, *arguments: Any, **options: Any) -> dict[str, torch.nn.Module]:
        layers: dict[str, torch.nn.Module] = find_layers(module, *arguments, **options)
        return {name: layer for name, layer in layers.items() if layer in found}

    bound = {"report": report, "names": {module: name for name, module in targets.items()}}
    with (
        patch.object(_base, "GPTQ", type("BoundGPTQ", (ReportingGPTQ,), bound)),
        patch.object(_base, "find_layers", find_targets),
    ):
        report.start()
        yield
