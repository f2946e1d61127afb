"""From domain errors to `google.rpc.Status`, by one table."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from bitmill_common import errors

DOMAIN = "bitmill"
# gRPC sends details in trailers, which peers commonly limit to 8 KiB in all; whole texts are in Get.
MAX_MESSAGE_CHARACTERS = 2000
MAX_VIOLATIONS = 20

CODES: dict[type[errors.BitmillError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DataLossError: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


def code_of(error: errors.BitmillError) -> grpc.StatusCode:
    """Returns the status code of the error's nearest class in the table; INTERNAL for one that is not in it."""
    for error_type in type(error).__mro__:
        if error_type in CODES:
            return CODES[error_type]
    return grpc.StatusCode.INTERNAL


def to_status(error: errors.BitmillError) -> status_pb2.Status:
    """Builds the status of an error: one ErrorInfo, and BadRequest, RetryInfo or QuotaFailure where they apply."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={key: _cut(value, MAX_MESSAGE_CHARACTERS // 4) for key, value in error.metadata.items()},
        )
    ]
    match error:
        case errors.InvalidArgumentError():
            bad_request = error_details_pb2.BadRequest()
            for violation in error.violations[:MAX_VIOLATIONS]:
                bad_request.field_violations.add(
                    field=violation.field,
                    description=_cut(violation.description, MAX_MESSAGE_CHARACTERS // 8),
                    reason=violation.reason,
                )
            details.append(bad_request)
        case errors.UnavailableError():
            delay = duration_pb2.Duration()
            delay.FromTimedelta(error.retry_after)
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        case errors.ResourceExhaustedError():
            quota = error_details_pb2.QuotaFailure()
            quota.violations.add(subject=error.reason, description=_cut(error.message, MAX_MESSAGE_CHARACTERS))
            details.append(quota)
    status = status_pb2.Status(code=code_of(error).value[0], message=_cut(error.message, MAX_MESSAGE_CHARACTERS))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
