"""Whether an artifact can be served on a device."""

from __future__ import annotations

import pytest

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.models.devices import ServerDevice, require_device

CPU = DeviceSupport(Device.CPU)
AMPERE = DeviceSupport(Device.CUDA, 80)


@pytest.mark.parametrize(
    ("supported", "server"),
    [
        ((CPU,), ServerDevice(Device.CPU)),
        ((AMPERE, CPU), ServerDevice(Device.CPU)),
        ((AMPERE,), ServerDevice(Device.CUDA, 80)),
        ((CPU, AMPERE), ServerDevice(Device.CUDA, 90, "NVIDIA H200")),
    ],
)
def test_any_entry_that_covers_the_device_is_enough(supported: tuple[DeviceSupport, ...], server: ServerDevice) -> None:
    """A newer GPU than asked for is covered too."""
    require_device(supported, server, "it")


@pytest.mark.parametrize(
    ("supported", "server", "needed", "there"),
    [
        ((AMPERE,), ServerDevice(Device.CPU), "CUDA with compute capability 8.0", "CPU"),
        ((AMPERE,), ServerDevice(Device.CUDA, 75, "Tesla T4"), "8.0", "Tesla T4 (compute capability 7.5)"),
        ((CPU,), ServerDevice(Device.CUDA, 90), "a CPU", "compute capability 9.0"),
        ((), ServerDevice(Device.CPU), "its manifest does not name", "CPU"),
    ],
)
def test_the_error_names_what_is_needed_and_what_is_there(
    supported: tuple[DeviceSupport, ...], server: ServerDevice, needed: str, there: str
) -> None:
    """A person who reads it knows which machine to take."""
    with pytest.raises(FailedPreconditionError) as caught:
        require_device(supported, server, "the artifact")
    assert caught.value.reason == "DEVICE_UNSUPPORTED"
    assert needed in caught.value.metadata["needed"]
    assert there in caught.value.metadata["server_device"]
