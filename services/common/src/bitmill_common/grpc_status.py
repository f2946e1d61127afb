"""From domain errors to `google.rpc.Status`, by one table."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from bitmill_common import errors

DOMAIN = "bitmill"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback: milliseconds; negative: not at all.
RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
LONGEST_PUSHBACK = timedelta(seconds=5)
# gRPC sends a status in trailers, which peers limit to 8 KiB in all; more, and the caller gets RESOURCE_EXHAUSTED
# instead. The text travels twice, percent-encoded in grpc-message. Whole texts are in Get.
MAX_MESSAGE_BYTES = 1500
MAX_DETAILS_BYTES = 3500
MAX_VALUE_BYTES = 400

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
    """Builds the status of an error: one ErrorInfo, and BadRequest, RetryInfo or QuotaFailure where they apply.

    Long texts are cut, and details that would not fit are left out, so that the status always arrives.
    """
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    room = MAX_DETAILS_BYTES
    details: list[Message] = [info]
    match error:
        case errors.InvalidArgumentError():
            bad_request = error_details_pb2.BadRequest()
            room = _fill(bad_request.field_violations, map(_violation, error.violations), room)
            details.append(bad_request)
        case errors.UnavailableError():
            delay = duration_pb2.Duration()
            delay.FromTimedelta(error.retry_after)
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        case errors.ResourceExhaustedError():
            quota = error_details_pb2.QuotaFailure()
            quota.violations.add(subject=error.reason, description=_cut(message, MAX_VALUE_BYTES))
            details.append(quota)
    for key, value in error.metadata.items():
        sent = _cut(value, MAX_VALUE_BYTES)
        room -= len(key) + len(sent.encode())
        if room >= 0:
            info.metadata[key] = sent
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def trailers(error: errors.BitmillError, status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Returns what goes with an error's code and text: its `status`, and for UNAVAILABLE when gRPC may send it again.

    A client whose service config retries the call waits that long by itself, or not at all where `retry_after` is more
    than `LONGEST_PUSHBACK`: a refusal says more than a deadline that passes in silence.
    """
    details = (STATUS_DETAILS_KEY, status.SerializeToString())
    if not isinstance(error, errors.UnavailableError):
        return (details,)
    wait = error.retry_after // timedelta(milliseconds=1) if error.retry_after <= LONGEST_PUSHBACK else -1
    return details, (RETRY_PUSHBACK_KEY, str(wait))


def _violation(violation: errors.FieldViolation) -> error_details_pb2.BadRequest.FieldViolation:
    return error_details_pb2.BadRequest.FieldViolation(
        field=_cut(violation.field, MAX_VALUE_BYTES),
        description=_cut(violation.description, MAX_VALUE_BYTES),
        reason=violation.reason,
    )


def _fill(into: Any, items: Iterable[Message], room: int) -> int:
    """Appends the items that fit into `room` bytes and returns what is left of it."""
    for item in items:
        if item.ByteSize() > room:
            break
        into.append(item)
        room -= item.ByteSize()
    return room


def _cut(text: str, limit: int) -> str:
    """Returns text that takes at most `limit` bytes percent-encoded, as grpc-message is; never half a character."""
    clean = text.encode(errors="replace").decode()  # protobuf refuses lone surrogates, as in undecodable file names
    used = 9  # the ellipsis
    for position, character in enumerate(clean):
        used += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if used > limit:
            return clean[:position] + "…"
    return clean
