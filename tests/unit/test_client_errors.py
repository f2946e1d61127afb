"""Typed errors: how they are made of gRPC's and how they read."""

from __future__ import annotations

import pickle
from datetime import timedelta

import grpc
import pytest

from bitmill import errors
from bitmill.quantizer.v1.quantization_job_pb2 import JobError, JobState, QuantizationJob
from bitmill_common import errors as server_errors
from bitmill_common.grpc_status import CODES, to_status


def rpc_error(code: grpc.StatusCode, message: str, *trailers: tuple[str, str | bytes]) -> grpc.RpcError:
    metadata = grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, message, None)


def test_every_status_code_has_its_own_type() -> None:
    codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    types = {type(errors.from_rpc_error(rpc_error(code, ""))) for code in codes}
    assert len(types) == len(codes)
    assert all(issubclass(kind, errors.BitmillRpcError) for kind in types)


@pytest.mark.parametrize("kind", [kind for kind in CODES if kind is not server_errors.InvalidArgumentError])
def test_what_the_server_raises_is_what_the_client_raises(kind: type[server_errors.BitmillError]) -> None:
    """Same name, reason, message and metadata on both sides."""
    status = to_status(kind("SOME_REASON", "some text", {"key": "value"}))
    code = CODES[kind]
    details = ("grpc-status-details-bin", status.SerializeToString())
    error = errors.from_rpc_error(rpc_error(code, status.message, details), "r1")
    assert type(error).__name__ == kind.__name__
    assert (error.reason, error.message, error.metadata) == ("SOME_REASON", "some text", {"key": "value"})
    assert error.request_id == "r1"


def test_the_servers_request_id_wins_over_the_one_sent() -> None:
    error = errors.from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "", ("x-request-id", "theirs")), "mine")
    assert error.request_id == "theirs"


def test_details_that_are_not_a_status_are_left_out() -> None:
    error = errors.from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "x", ("grpc-status-details-bin", b"\xff\xff")))
    assert (error.reason, error.field_violations, error.retry_delay) == ("", (), None)


def test_the_text_has_code_reason_message_and_each_detail_once() -> None:
    error = errors.UnavailableError(
        errors.RpcStatus(
            grpc.StatusCode.UNAVAILABLE,
            "model m is loading",
            reason="MODEL_LOADING",
            metadata={"model": "m", "phase": "FETCH"},
            retry_delay=timedelta(seconds=2.5),
            request_id="r1",
        )
    )
    assert str(error).splitlines() == [
        "UNAVAILABLE MODEL_LOADING: model m is loading",
        "  phase=FETCH",
        "  try again after 2.5 s",
        "  request id r1",
    ]


def test_a_field_that_the_message_leaves_out_has_a_line() -> None:
    violation = errors.FieldViolation("spec.seed", "must not be negative")
    error = errors.InvalidArgumentError(
        errors.RpcStatus(grpc.StatusCode.INVALID_ARGUMENT, "2 wrong fields", field_violations=(violation,))
    )
    assert "  spec.seed: must not be negative" in str(error).splitlines()


def test_an_error_crosses_processes() -> None:
    error = errors.NotFoundError(errors.RpcStatus(grpc.StatusCode.NOT_FOUND, "no", reason="JOB_NOT_FOUND"))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.status, str(copy)) == (type(error), error.status, str(error))


def test_a_job_that_failed_says_why() -> None:
    failed = QuantizationJob(job_id="j", state=JobState.JOB_STATE_FAILED, error=JobError(reason="R", message="text"))
    assert str(errors.JobNotSucceededError(failed)) == "job j FAILED R: text"
    cancelled = QuantizationJob(job_id="j", state=JobState.JOB_STATE_CANCELLED)
    assert str(errors.JobNotSucceededError(cancelled)) == "job j CANCELLED"
