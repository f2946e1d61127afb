"""What the server's machine tells of its GPUs, through a driver that plays NVIDIA's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from bitmill_quantizer.host import LinuxHost


class Driver:
    """`libcuda.so.1` of a machine with so many GPUs; `fault` is what cuInit answers."""

    def __init__(self, num_devices: int, fault: int = 0) -> None:
        self._num_devices = num_devices
        self._fault = fault

    def cuInit(self, flags: int) -> int:  # noqa: N802 (NVIDIA's name)
        return self._fault

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self._num_devices
        return 0


@pytest.mark.parametrize(
    ("driver", "found"), [(Driver(2), True), (Driver(0), False), (Driver(1, fault=100), False), (None, False)]
)
def test_a_gpu_is_there_when_the_driver_finds_one(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, found: bool
) -> None:
    """A driver without a device, or that does not start, or none at all: no GPU."""

    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert LinuxHost().has_cuda() is found
