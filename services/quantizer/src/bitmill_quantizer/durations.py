"""How long a job will take, and what that is based on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DurationEstimate:
    """Expected time from start to end in seconds, and for people what it is based on."""

    seconds: float
    basis: str
