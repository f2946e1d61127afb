"""How much memory this host has for another process: the kernel's estimate, and the limits of its control groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
# Pages that the kernel drops or writes back before it kills anybody.
_RECLAIMABLE = frozenset({"inactive_file", "active_file", "slab_reclaimable"})


def host_available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that processes of this one's control groups can still get, swap included.

    `MemAvailable` of /proc/meminfo, bounded by the limit of each control group, v1 or v2, that this process is in.
    """
    meminfo = _numbers(proc / "meminfo")
    available = (meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)) * _KIB
    return max(min([available, *_group_rooms(proc, groups)]), 0)


def _group_rooms(proc: Path, groups: Path) -> Iterator[int]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files, prefix = groups, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            root, files, prefix = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        # Inside a container the own group may be the root, and the path that of the host.
        group = root / path.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # "max", or a root, which has no limit
                    limit, used = (int((directory / name).read_text()) for name in files)
                    yield limit - used + _reclaimable(directory / "memory.stat", prefix)


def _reclaimable(path: Path, prefix: str) -> int:
    statistics = _numbers(path)
    return sum(statistics.get(prefix + name, 0) for name in _RECLAIMABLE)


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of lines like "MemAvailable:  123 kB"."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
