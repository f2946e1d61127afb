"""The AutoGPTQ engine: `python -m bitmill_engine_auto_gptq REQUEST.json`."""

import sys

from bitmill_engine_kit.protocol import EvaluateRequest, QuantizeRequest
from bitmill_engine_kit.runner import Operation, run


def _quantize() -> Operation:
    from bitmill_engine_auto_gptq.quantize import quantize

    return quantize


def _evaluate() -> Operation:
    from bitmill_engine_auto_gptq.evaluate import evaluate

    return evaluate


if __name__ == "__main__":
    sys.exit(run("bitmill_engine_auto_gptq", {QuantizeRequest: _quantize, EvaluateRequest: _evaluate}))
