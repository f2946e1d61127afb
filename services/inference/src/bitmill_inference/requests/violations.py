"""Collects what is wrong with a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bitmill_common.errors import FieldViolation, InvalidArgumentError


@dataclass
class Violations:
    """Collects what is wrong with a request, so that its caller learns everything at once."""

    found: list[FieldViolation] = field(default_factory=list)

    def add(self, path: str, description: str, reason: str = "INVALID_FIELD") -> None:
        """Notes one wrong field."""
        self.found.append(FieldViolation(path, description, reason))

    def range(self, path: str, value: float | None, allowed: bool, expected: str) -> None:
        """Notes `value` when it is set and not finite or not allowed."""
        if value is not None and not (math.isfinite(value) and allowed):
            self.add(path, f"must be {expected}, got {value:g}", "OUT_OF_RANGE")

    def raise_if_any(self) -> None:
        """Raises InvalidArgumentError with everything found."""
        if self.found:
            raise InvalidArgumentError(self.found)
