"""What the engine does to its own process before any work, and what it reads of it afterwards. No torch."""

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def isolate_stdout() -> TextIO:
    """Take the real standard output for events and let everything else that prints write to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, and SIGTERM to end it whatever the parent ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, cut by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores  # no cgroup v2
    return cores if quota == "max" else max(1, min(cores, math.floor(int(quota) / int(period))))


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
