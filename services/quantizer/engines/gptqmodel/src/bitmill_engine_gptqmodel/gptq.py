"""GPTQModel's rounding of a layer, with losses and damping reported, and damping that grows as every engine's does."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gptqmodel.looper import gptq_processor, loop_processor, module_looper
from gptqmodel.quantization import GPTQ
from gptqmodel.utils.threadx import _DeviceWorker

from bitmill_engine_kit.damping import damped
from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_kit.rounding import RoundingReport


class ReportingGPTQ(GPTQ):  # type: ignore[misc]
    """Reports each layer, and ends the run where GPTQModel would round to nearest and only log it."""

    report: RoundingReport
    num_calibration_samples: int

    @property
    def _layer_name(self) -> str:
        return str(self._named_module.full_name)

    def quantize(self, blocksize: int = 128) -> Any:
        """Round the layer's weight; returns what GPTQModel's own does."""
        if not self.nsamples:
            raise EngineError("NOT_CALIBRATED", f"no token reached {self._layer_name}", layer=self._layer_name)
        answer = super().quantize(blocksize)
        _weight, _scales, _zeros, _groups, _duration, loss, damping, num_tokens = answer
        # GPTQModel's Hessian is a mean over tokens, and so is its loss once more.
        self.report.add(self._layer_name, loss * num_tokens**2 / self.num_calibration_samples, damping)
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
            upper = torch.linalg.cholesky(inverse, upper=True)
            if not upper.isfinite().all():
                raise torch.linalg.LinAlgError("the factor of the inverse Hessian is not finite")
            return upper

        return damped(H, self.qcfg.damp_percent, self._layer_name, work)


def _warm_up(worker: Any) -> None:
    try:
        _WARM_UP(worker)
    except Exception:  # noqa: BLE001 (whatever it is, the task itself will say)
        traceback.print_exc()


_WARM_UP = _DeviceWorker._run_warmup


@contextmanager
def reporting(report: RoundingReport, num_calibration_samples: int) -> Iterator[None]:
    """Within it GPTQModel reports each layer that it rounds, with its loss per calibration sample."""
    bound = {"report": report, "num_calibration_samples": num_calibration_samples}
    with (
        tempfile.TemporaryDirectory(prefix="bitmill-gptqmodel-") as logs,
        patch.object(gptq_processor, "GPTQ", type("BoundGPTQ", (ReportingGPTQ,), bound)),
        # The working directory is not its own.
        patch.object(loop_processor, "_PROJECT_LOG_DIR", Path(logs)),
        # A worker thread that fails ends the process on the spot, though the waiting thread is told of the failure too.
        patch.object(_DeviceWorker, "_abort_process", lambda *_: None),
        patch.object(_DeviceWorker, "_run_warmup", _warm_up),
        # It writes 100 MB to a temporary file, to log how fast the disk is.
        patch.object(module_looper, "io_write_performance", lambda: None),
    ):
        report.start()
        yield
