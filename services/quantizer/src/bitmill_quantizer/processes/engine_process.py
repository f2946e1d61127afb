"""A quantization engine as a child process."""

from __future__ import annotations

from pathlib import Path

from bitmill_common.manifest_recipe import recipe_to_json
from bitmill_common.recipes import Calibration, Recipe
from bitmill_quantizer.ports import EvaluateOutcome, JobControl, QuantizeOutcome
from bitmill_quantizer.processes import engine_messages
from bitmill_quantizer.processes.protocol_process import ProtocolProcess, as_protocol_fault


class EngineProcess:
    """An engine by its interpreter and module; `install_hint` says how to get it where it is missing.

    What it prints outside the protocol goes to `engine.log` in the job's directory, beside the model directory.
    """

    def __init__(self, name: str, python: Path, module: str, install_hint: str) -> None:
        self.name = name
        self._process = ProtocolProcess(name, python, module, install_hint)

    def require_installed(self) -> None:
        """Raises `FailedPreconditionError` ENGINE_NOT_INSTALLED, which says how to install it."""
        self._process.require_installed()

    def quantize(
        self,
        source_dir: Path,
        output_dir: Path,
        recipe: Recipe,
        calibration: Calibration,
        calibration_path: Path | None,
        control: JobControl,
    ) -> QuantizeOutcome:
        """Writes a quantized model directory to `output_dir`."""
        request: dict[str, object] = {
            "operation": "quantize",
            "source_dir": str(source_dir),
            "output_dir": str(output_dir),
            "recipe": recipe_to_json(recipe),
            "calibration": engine_messages.calibration_json(calibration, calibration_path),
        }
        result = self._process.run(request, output_dir.parent, control)
        with as_protocol_fault(self.name):
            return engine_messages.parse_quantize_result(result)

    def evaluate(
        self, source_dir: Path, model_dir: Path, num_tokens: int, window: int, control: JobControl
    ) -> EvaluateOutcome:
        """Compares a model with its source on held-out text."""
        request: dict[str, object] = {
            "operation": "evaluate",
            "source_dir": str(source_dir),
            "model_dir": str(model_dir),
            "num_tokens": num_tokens,
            "window": window,
        }
        result = self._process.run(request, model_dir.parent, control)
        with as_protocol_fault(self.name):
            return engine_messages.parse_evaluate_result(result)
