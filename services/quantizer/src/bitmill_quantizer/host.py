"""The machine that the worker runs on, as Linux tells of it."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class LinuxHost:
    """Disk from `statvfs`; memory from `sysconf`, or the control group's limit where that is lower."""

    def free_disk_bytes(self, directory: Path) -> int:
        """Returns the bytes free to this process on the file system that holds `directory`, or will hold it."""
        while not directory.exists():
            directory = directory.parent
        return shutil.disk_usage(directory).free

    def memory_bytes(self) -> int:
        """Returns the memory that processes here may use in all."""
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
        return min(installed, int(limit)) if limit.isdigit() else installed

    def has_cuda(self) -> bool:
        """Whether NVIDIA's driver finds a GPU that this process may use. Takes no memory of it."""
        return _cuda_driver() is not None

    def device_memory_bytes(self) -> int:
        """Returns the memory of the first such GPU, as the driver tells; 0 where there is none."""
        driver, memory, device = _cuda_driver(), ctypes.c_size_t(), ctypes.c_int()
        if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
            return 0
        return memory.value if driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0 else 0


def _cuda_driver() -> ctypes.CDLL | None:
    """Returns NVIDIA's driver once it has found a GPU; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    is_there = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return driver if is_there else None
