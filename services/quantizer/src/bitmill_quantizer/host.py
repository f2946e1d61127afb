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
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
        count = ctypes.c_int()
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
