"""The serving engine, which loads what a job made and generates with it, as a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bitmill_common.artifact import DeviceSupport
from bitmill_common.manifest_measurements import parse_verification
from bitmill_common.measurements import Verification
from bitmill_quantizer.ports import JobControl
from bitmill_quantizer.processes.protocol_process import ProtocolProcess, as_protocol_fault


class VerifierProcess:
    """A verifier by its interpreter and module, which speaks the engine protocol's operation `verify`."""

    name = "verifier"

    def __init__(self, python: Path, module: str, install_hint: str) -> None:
        self._process = ProtocolProcess(self.name, python, module, install_hint)

    def require_installed(self) -> None:
        """Raises `FailedPreconditionError` ENGINE_NOT_INSTALLED, which says how to install it."""
        self._process.require_installed()

    def verify(self, model_dir: Path, devices: Sequence[DeviceSupport], control: JobControl) -> Verification:
        """See `ports.Verifier`."""
        request = {
            "operation": "verify",
            "model_dir": str(model_dir),
            "devices": [
                {"device": each.device.value, "min_compute_capability": each.min_compute_capability} for each in devices
            ],
        }
        result = self._process.run(request, model_dir.parent, control)
        with as_protocol_fault(self.name):
            return parse_verification(result)
