"""The GPTQModel engine: `python -m bitmill_engine_gptqmodel REQUEST.json`."""

import os
import sys

from bitmill_engine_kit.process import usable_cores
from bitmill_engine_kit.protocol import EvaluateRequest, QuantizeRequest
from bitmill_engine_kit.runner import Operation, run


def _prepare_library() -> None:
    # Read when it is imported. Half of the host's cores otherwise, and one worker cannot hold its own pools.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, usable_cores())))
    # It draws several bars for each batch, on what is a log here; on such a terminal it draws none.
    os.environ["TERM"] = "dumb"


def _quantize() -> Operation:
    _prepare_library()
    from bitmill_engine_gptqmodel.quantize import quantize

    return quantize


def _evaluate() -> Operation:
    _prepare_library()
    from bitmill_engine_gptqmodel.evaluate import evaluate

    return evaluate


if __name__ == "__main__":
    sys.exit(run("bitmill_engine_gptqmodel", {QuantizeRequest: _quantize, EvaluateRequest: _evaluate}))
