"""Which device this server has, and whether an artifact can be served on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.models.engine_options import EngineOptions


@dataclass(frozen=True)
class ServerDevice:
    """The device engines run on. `compute_capability` is major * 10 + minor for CUDA, 0 elsewhere.

    `count`: GPUs that this server has; on the CPU the cores, of which each worker needs one. `sleep_mode`: whether an
    engine can free the device's memory and keep its weights on the host.
    """

    device: Device
    compute_capability: int = 0
    name: str = ""
    count: int = 1
    sleep_mode: bool = False

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


def require_options(options: EngineOptions, server: ServerDevice) -> None:
    """Raises FailedPreconditionError for options that this server's device has not enough of, or not at all."""
    # Ray finds devices on other hosts.
    if options.num_devices > server.count and options.distributed_executor_backend != "ray":
        sizes = {
            name: str(size)
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
            if (size := getattr(options, name)) is not None
        }
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        unit = "GPUs" if server.device is Device.CUDA else "CPU cores"
        raise FailedPreconditionError(
            "DEVICES_MISSING",
            f"{product} needs {options.num_devices} {unit}; this server has {server.count}",
            sizes | {"needed": str(options.num_devices), "available": str(server.count)},
        )
    offloading = [name for name in ("cpu_offload_gb", "kv_offloading_size") if getattr(options, name) is not None]
    if offloading and server.device is Device.CPU:
        raise FailedPreconditionError(
            "OFFLOADING_UNSUPPORTED",
            f"{' and '.join(offloading)} move what a GPU holds to the host; this server has {server}",
            {"options": ", ".join(offloading), "server_device": str(server)},
        )
    if options.enable_sleep_mode and not server.sleep_mode:
        raise FailedPreconditionError(
            "SLEEP_MODE_UNSUPPORTED",
            f"enable_sleep_mode needs a GPU whose memory can be freed; this server has {server}",
            {"server_device": str(server)},
        )


def _describe(support: DeviceSupport) -> str:
    if support.device is Device.CUDA:
        return f"CUDA with compute capability {_version(support.min_compute_capability)} or higher"
    return "a CPU"


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
