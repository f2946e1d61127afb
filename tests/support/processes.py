"""Waiting for processes that are not this one's children."""

from __future__ import annotations

import os
import select

DEADLINE_S = 30.0


def ends(pid: int, timeout_s: float = DEADLINE_S) -> bool:
    """Waits until a process has ended, reaped or not, and returns whether it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
