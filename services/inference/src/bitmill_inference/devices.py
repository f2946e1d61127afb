"""Which device this server has, and whether an artifact can be served on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.errors import FailedPreconditionError


@dataclass(frozen=True)
class ServerDevice:
    """The device engines run on. `compute_capability` is major * 10 + minor for CUDA, 0 elsewhere."""

    device: Device
    compute_capability: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.device is Device.CUDA:
            return f"{self.name or 'CUDA'} (compute capability {_version(self.compute_capability)})"
        return "CPU"


def require_device(supported: Sequence[DeviceSupport], server: ServerDevice, what: str) -> None:
    """Raises FailedPreconditionError naming what is missing when no entry of `supported` covers the server's device."""
    for support in supported:
        if support.device is server.device and support.min_compute_capability <= server.compute_capability:
            return
    needed = " or ".join(_describe(support) for support in supported) or "a device that its manifest does not name"
    raise FailedPreconditionError(
        "DEVICE_UNSUPPORTED",
        f"{what} needs {needed}; this server has {server}",
        {"needed": needed, "server_device": str(server)},
    )


def _describe(support: DeviceSupport) -> str:
    if support.device is Device.CUDA:
        return f"CUDA with compute capability {_version(support.min_compute_capability)} or higher"
    return "a CPU"


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
