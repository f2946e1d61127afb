"""The errors that bitmill's domain raises.

BitmillError
├── InvalidArgumentError       bad input; names every wrong field
├── NotFoundError              no such job, artifact, model or object
├── AlreadyExistsError         the name or id is taken by something else
├── PermissionDeniedError      outside the roots that the configuration allows
├── FailedPreconditionError    the checkpoint, the artifact or this server cannot be used for that
├── ResourceExhaustedError     a quota or a size limit
├── UnavailableError           not now; try again after `retry_after`
├── DataLossError              stored bytes are not what their manifest says
├── DeadlineExceededError      the work did not end in time
├── CancelledError             given up on request
└── InternalError              a part of bitmill failed; the log has the rest

One table, `bitmill_common.grpc_status.CODES`, maps them to gRPC status codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request.

    `field` is its path in the request message (`spec.recipe.group_size`), `description` says what is wrong and what
    would be right, `reason` is a stable UPPER_SNAKE_CASE word.
    """

    field: str
    description: str
    reason: str = "INVALID_FIELD"


class BitmillError(Exception):
    """An error with a stable `reason` (UPPER_SNAKE_CASE), a text for people and `metadata` for programs."""

    def __init__(self, reason: str, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles by state, so that every subclass crosses a process or a database as it is."""
        return (_restore, (type(self), self.__dict__.copy()))


def _restore(error_type: type[BitmillError], state: dict[str, object]) -> BitmillError:
    error = error_type.__new__(error_type, state["message"])
    error.__dict__.update(state)
    return error


class InvalidArgumentError(BitmillError):
    """Bad input. `violations` names every wrong field."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        reason = self.violations[0].reason if len(self.violations) == 1 else "INVALID_FIELDS"
        super().__init__(reason, "; ".join(f"{v.field}: {v.description}" for v in self.violations))


class NotFoundError(BitmillError):
    """No such thing."""


class AlreadyExistsError(BitmillError):
    """The name or id is taken by something else."""


class PermissionDeniedError(BitmillError):
    """Outside what the server's configuration allows."""


class FailedPreconditionError(BitmillError):
    """The input is well-formed, but this checkpoint, artifact or server cannot be used for it."""


class ResourceExhaustedError(BitmillError):
    """A quota or a size limit is reached."""


class UnavailableError(BitmillError):
    """Not now. A caller should try again after `retry_after`."""

    def __init__(
        self,
        reason: str,
        message: str,
        metadata: Mapping[str, str] | None = None,
        retry_after: timedelta = timedelta(seconds=1),
    ) -> None:
        super().__init__(reason, message, metadata)
        self.retry_after = retry_after


class DataLossError(BitmillError):
    """Stored bytes are not what their manifest says."""


class DeadlineExceededError(BitmillError):
    """The work did not end before the call's deadline."""


class CancelledError(BitmillError):
    """Given up because somebody asked for it."""


class InternalError(BitmillError):
    """A part of bitmill failed in a way that the caller can do nothing about."""
