"""The errors that bitmill's clients raise.

BitmillError
├── BitmillRpcError                a call failed; one subclass per status code
│   ├── CancelledError             given up on request
│   ├── UnknownError               no status that bitmill gives
│   ├── InvalidArgumentError       bad input; `field_violations` names every wrong field
│   ├── DeadlineExceededError      no answer within the call's deadline
│   ├── NotFoundError              no such job, artifact or model
│   ├── AlreadyExistsError         the name or id is taken by something else
│   ├── PermissionDeniedError      outside the roots that the server allows
│   ├── ResourceExhaustedError     a quota or a size limit
│   ├── FailedPreconditionError    the checkpoint, the artifact or the server cannot be used for that
│   ├── AbortedError               lost against a concurrent change
│   ├── OutOfRangeError            past the end
│   ├── UnimplementedError         the server does not know the call
│   ├── InternalError              a part of the server failed; its log has the rest by request id
│   ├── UnavailableError           not reachable, or not now; try again after `retry_delay`
│   ├── DataLossError              stored bytes are not what their manifest says
│   └── UnauthenticatedError       no valid credentials
├── JobNotSucceededError           a job that was waited for failed or was cancelled
└── RequestValueError              a value that no request can hold; a ValueError too; nothing was sent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from bitmill.quantizer.v1.quantization_job_pb2 import JobState, QuantizationJob

M = TypeVar("M", bound=Message)

REQUEST_ID_KEY = "x-request-id"
STATUS_DETAILS_KEY = "grpc-status-details-bin"


class BitmillError(Exception):
    """Any error of this package."""


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request: its path, what is wrong and what would be right, and a stable reason."""

    field: str
    description: str
    reason: str = ""


@dataclass(frozen=True)
class RpcStatus:
    """What a server, or gRPC itself, said about a failed call."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    """Stable UPPER_SNAKE_CASE word. Empty when the status is gRPC's own and no bitmill server sent it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Details by key."""
    field_violations: tuple[FieldViolation, ...] = ()
    """Every wrong field, for INVALID_ARGUMENT."""
    retry_delay: timedelta | None = None
    """When the server suggests to try again."""
    request_id: str = ""
    """The id under which the server's log has the call."""


class BitmillRpcError(BitmillError):
    """A call failed. The fields of its `RpcStatus` are attributes of the error too."""

    def __init__(self, status: RpcStatus) -> None:
        super().__init__(status)
        self.status = status
        self.code = status.code
        self.message = status.message
        self.reason = status.reason
        self.metadata = status.metadata
        self.field_violations = status.field_violations
        self.retry_delay = status.retry_delay
        self.request_id = status.request_id

    def __str__(self) -> str:
        """The code, the reason and the message, then a line for each detail that the message does not hold."""
        lines = [f"{self.code.name}{f' {self.reason}' if self.reason else ''}: {self.message}"]
        lines += [
            f"  {violation.field}: {violation.description}"
            for violation in self.field_violations
            if violation.description not in self.message
        ]
        lines += [f"  {key}={value}" for key, value in sorted(self.metadata.items()) if value not in self.message]
        if self.retry_delay is not None:
            lines.append(f"  try again after {self.retry_delay.total_seconds():g} s")
        unreached = self.code is grpc.StatusCode.UNAVAILABLE and not self.reason
        if self.request_id and not unreached:
            lines.append(f"  request id {self.request_id}")
        return "\n".join(lines)


class CancelledError(BitmillRpcError):
    """Given up because somebody asked for it."""


class UnknownError(BitmillRpcError):
    """A status that bitmill itself never gives."""


class InvalidArgumentError(BitmillRpcError):
    """Bad input. `field_violations` names every wrong field."""


class DeadlineExceededError(BitmillRpcError):
    """No answer within the call's deadline."""


class NotFoundError(BitmillRpcError):
    """No such job, artifact or model."""


class AlreadyExistsError(BitmillRpcError):
    """The name or id is taken by something else."""


class PermissionDeniedError(BitmillRpcError):
    """Outside what the server's configuration allows."""


class ResourceExhaustedError(BitmillRpcError):
    """A quota or a size limit is reached."""


class FailedPreconditionError(BitmillRpcError):
    """The request is well-formed, but this checkpoint, artifact or server cannot be used for it."""


class AbortedError(BitmillRpcError):
    """Lost against a concurrent change."""


class OutOfRangeError(BitmillRpcError):
    """Past the end of something."""


class UnimplementedError(BitmillRpcError):
    """The server does not know the call: another version, or the other one of the two services."""


class InternalError(BitmillRpcError):
    """A part of the server failed. Its log has the rest by request id."""


class UnavailableError(BitmillRpcError):
    """The server cannot be reached, or cannot do it now. Try again after `retry_delay`."""


class DataLossError(BitmillRpcError):
    """Stored bytes are not what their manifest says."""


class UnauthenticatedError(BitmillRpcError):
    """No valid credentials."""


class JobNotSucceededError(BitmillError):
    """A job that was waited for ended as FAILED or CANCELLED. `job` is its final state."""

    def __init__(self, job: QuantizationJob) -> None:
        super().__init__(job)
        self.job = job

    def __str__(self) -> str:
        """The job's id and state, and why it failed."""
        state = JobState.Name(self.job.state).removeprefix("JOB_STATE_")
        error = self.job.error
        return f"job {self.job.job_id} {state}" + (f" {error.reason}: {error.message}" if error.reason else "")


class RequestValueError(BitmillError, ValueError):
    """A value that no request can hold, such as an unknown scheme or an integer out of range. Nothing was sent."""


_TYPES: dict[grpc.StatusCode, type[BitmillRpcError]] = {
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNKNOWN: UnknownError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


def from_rpc_error(error: grpc.RpcError, request_id: str = "") -> BitmillRpcError:
    """Turns gRPC's error, of a sync or an async call, into the typed one.

    `request_id` is the id that the call was sent with, for a server that did not echo one.
    """
    trailers: Iterable[Any] = error.trailing_metadata() or ()
    metadata = dict(trailers)
    rich = status_pb2.Status()
    with suppress(DecodeError):  # Some proxy's own bytes: the code and the message are all there is.
        rich.ParseFromString(metadata.get(STATUS_DETAILS_KEY, b""))
    info = _detail(rich, error_details_pb2.ErrorInfo()) or error_details_pb2.ErrorInfo()
    bad_request = _detail(rich, error_details_pb2.BadRequest()) or error_details_pb2.BadRequest()
    retry = _detail(rich, error_details_pb2.RetryInfo())
    status = RpcStatus(
        code=error.code(),
        message=error.details() or "",
        reason=info.reason,
        metadata=dict(info.metadata),
        field_violations=tuple(FieldViolation(v.field, v.description, v.reason) for v in bad_request.field_violations),
        retry_delay=retry.retry_delay.ToTimedelta() if retry else None,
        request_id=metadata.get(REQUEST_ID_KEY, request_id),
    )
    return _TYPES.get(status.code, UnknownError)(status)


def _detail(status: status_pb2.Status, into: M) -> M | None:
    return next((into for detail in status.details if detail.Unpack(into)), None)
