"""What stands in a job's way: one thing at a time, and the one error for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field

from bitmill_common.errors import BitmillError, FailedPreconditionError, FieldViolation, InvalidArgumentError


@dataclass(frozen=True)
class Problem:
    """One thing that stands in a job's way. `field` is empty when the checkpoint or this server is at fault.

    `kind` and `metadata` are those of the error that it would be alone.
    """

    field: str
    reason: str
    description: str
    kind: type[BitmillError] = FailedPreconditionError
    metadata: Mapping[str, str] = dataclass_field(default_factory=dict)


def wrong_field(field: str, reason: str, description: str) -> Problem:
    """Returns the problem of a request's field."""
    return Problem(field, reason, description, kind=InvalidArgumentError)


def raise_for(problems: Sequence[Problem]) -> None:
    """Raises the one error that stands for all the problems; returns when there are none.

    Wrong fields go first, as `InvalidArgumentError`; what remains is said once they are right.
    """
    violations = [FieldViolation(p.field, p.description, p.reason) for p in problems if p.kind is InvalidArgumentError]
    if violations:
        raise InvalidArgumentError(violations)
    if problems:
        first = problems[0]
        raise first.kind(first.reason, "; ".join(p.description for p in problems), first.metadata)
