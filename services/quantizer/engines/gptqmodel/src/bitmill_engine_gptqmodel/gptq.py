"""GPTQModel's rounding of a layer, with losses and damping reported, and damping that grows as every engine's does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from gptqmodel.looper import gptq_processor
from gptqmodel.quantization import GPTQ

from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_kit.rounding import RoundingReport, damped


class ReportingGPTQ(GPTQ):  # type: ignore[misc]
    """Reports each layer, and ends the run where GPTQModel would round to nearest and only log it."""

    report: RoundingReport

    @property
    def _layer_name(self) -> str:
        return str(self._named_module.full_name)

    def quantize(self, blocksize: int = 128) -> Any:
        """Round the layer's weight; returns what GPTQModel's own does."""
        if not self.nsamples:
            raise EngineError("NOT_CALIBRATED", f"no token reached {self._layer_name}", layer=self._layer_name)
        answer = super().quantize(blocksize)
        _weight, _scales, _zeros, _groups, _duration, loss, damping, _samples = answer
        self.report.add(self._layer_name, float(loss), float(damping))
        return answer

    def hessian_inverse(self, H: torch.Tensor) -> tuple[torch.Tensor, float]:  # noqa: N803 (GPTQModel's name)
        """The upper Cholesky factor of the inverse, and the damping that it took.

        GPTQModel's own adds 0.01 at a time and then to the diagonal itself, and records neither.
        """
        mean = H.diagonal().mean()

        def work(damping: float) -> torch.Tensor:
            factor = H.clone()
            factor.diagonal().add_(damping * mean)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(factor))
            return torch.linalg.cholesky(inverse, upper=True)

        return damped(H, self.qcfg.damp_percent, self._layer_name, work)


@contextmanager
def reporting(report: RoundingReport) -> Iterator[None]:
    """Within it GPTQModel reports each layer that it rounds."""
    with patch.object(gptq_processor, "GPTQ", type("BoundGPTQ", (ReportingGPTQ,), {"report": report})):
        report.start()
        yield
