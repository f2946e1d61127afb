"""Both clients, sync and async, against a real server: deadlines, ids, errors, pages, channels."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import grpc
import pytest

from bitmill import errors as client_errors
from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.model_pb2 import Model
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent, JobState, QuantizationJob
from bitmill_common import errors
from support.client_drivers import Driver
from support.fake_services import FakeServer, Hang


def job_response(**fields: Any) -> quantizer_pb.GetQuantizationJobResponse:
    return quantizer_pb.GetQuantizationJobResponse(job=QuantizationJob(job_id="j1", **fields))


def watched(sequence: int, state: JobState = JobState.JOB_STATE_RUNNING) -> quantizer_pb.WatchQuantizationJobResponse:
    event = JobEvent(sequence=sequence, job=QuantizationJob(job_id="j1", state=state))
    return quantizer_pb.WatchQuantizationJobResponse(event=event)


class TestDeadlines:
    def test_a_unary_call_has_a_default_deadline(self, server: FakeServer, driver: Driver) -> None:
        server.on("GetQuantizationJob", job_response())
        driver.quantizer(server.address, lambda client: client.job("j1"))
        assert server.only_call("GetQuantizationJob").time_remaining == pytest.approx(30, rel=0.2)

    def test_the_clients_timeout_replaces_the_default_and_the_calls_own_wins(
        self, server: FakeServer, driver: Driver
    ) -> None:
        server.on("GetQuantizationJob", job_response())
        driver.quantizer(server.address, lambda client: client.job("j1"), timeout=100)
        driver.quantizer(server.address, lambda client: client.job("j1", timeout=1000), timeout=100)
        first, second = (call.time_remaining for call in server.received["GetQuantizationJob"])
        assert first == pytest.approx(100, rel=0.2)
        assert second == pytest.approx(1000, rel=0.2)

    def test_infinity_means_no_deadline(self, server: FakeServer, driver: Driver) -> None:
        server.on("GetQuantizationJob", job_response())
        driver.quantizer(server.address, lambda client: client.job("j1", timeout=math.inf))
        assert server.only_call("GetQuantizationJob").time_remaining is None

    def test_a_watch_has_no_deadline_even_when_the_client_has_one(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", watched(1, JobState.JOB_STATE_SUCCEEDED))
        driver.quantizer(server.address, lambda client: client.watch("j1"), timeout=5)
        assert server.only_call("WatchQuantizationJob").time_remaining is None

    def test_a_call_that_the_server_does_not_answer_ends_at_its_deadline(
        self, server: FakeServer, driver: Driver
    ) -> None:
        server.on("GetQuantizationJob", Hang())
        with pytest.raises(client_errors.DeadlineExceededError):
            driver.quantizer(server.address, lambda client: client.job("j1", timeout=0.2))

    def test_a_stream_that_stalls_ends_at_its_deadline(self, server: FakeServer, driver: Driver) -> None:
        server.on("Generate", [inference_pb.GenerateResponse(text="a"), Hang()])
        with pytest.raises(client_errors.DeadlineExceededError):
            driver.inference(server.address, lambda client: client.generate("x", timeout=0.5))

    def test_a_watchs_own_timeout_ends_it(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", [watched(1), Hang()])
        with pytest.raises(client_errors.DeadlineExceededError):
            driver.quantizer(server.address, lambda client: client.watch("j1", timeout=0.5))


class TestRequestIds:
    def test_each_call_carries_a_new_id(self, server: FakeServer, driver: Driver) -> None:
        server.on("GetQuantizationJob", job_response())
        for _ in range(2):
            driver.quantizer(server.address, lambda client: client.job("j1"))
        ids = {call.metadata["x-request-id"] for call in server.received["GetQuantizationJob"]}
        assert len(ids) == 2

    def test_the_callers_id_is_sent(self, server: FakeServer, driver: Driver) -> None:
        server.on("GetQuantizationJob", job_response())
        driver.quantizer(server.address, lambda client: client.job("j1", request_id="mine"))
        assert server.only_call("GetQuantizationJob").metadata["x-request-id"] == "mine"

    def test_an_id_that_metadata_cannot_carry_is_refused_before_sending(
        self, server: FakeServer, driver: Driver
    ) -> None:
        with pytest.raises(client_errors.RequestValueError, match="request_id"):
            driver.quantizer(server.address, lambda client: client.job("j1", request_id="ä\n"))
        assert not server.received

    def test_quantize_sends_the_same_id_as_idempotency_key(self, server: FakeServer, driver: Driver) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse())
        driver.quantizer(server.address, lambda client: client.quantize("s3://b/m", "m", request_id="once"))
        driver.quantizer(server.address, lambda client: client.quantize("s3://b/m", "m"))
        first, second = server.received["CreateQuantizationJob"]
        assert first.request.request_id == first.metadata["x-request-id"] == "once"
        assert second.request.request_id == second.metadata["x-request-id"] != ""


class TestMetadata:
    def test_the_client_says_who_calls_and_the_call_may_say_for_whom(self, server: FakeServer, driver: Driver) -> None:
        server.on("GetModel", model_pb.GetModelResponse())
        driver.inference(server.address, lambda client: client.model("m"), caller_id="gateway")
        driver.inference(server.address, lambda client: client.model("m", caller_id="tenant-7"), caller_id="gateway")
        driver.inference(server.address, lambda client: client.model("m"))
        callers = [call.metadata.get("x-caller-id") for call in server.received["GetModel"]]
        assert callers == ["gateway", "tenant-7", None]

    def test_trace_headers_go_along(self, server: FakeServer, driver: Driver) -> None:
        server.on("Generate", [inference_pb.GenerateResponse()])
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Tracestate": "a=b"}
        driver.inference(
            server.address,
            lambda client: client.generate("x", trace_headers=trace),
            metadata=[("authorization", "Bearer t")],
        )
        metadata = server.only_call("Generate").metadata
        assert metadata["traceparent"] == trace["traceparent"]
        assert (metadata["tracestate"], metadata["authorization"]) == ("a=b", "Bearer t")

    @pytest.mark.parametrize("options", [{"caller_id": "ü"}, {"trace_headers": {"traceparent": "a\n"}}])
    def test_what_metadata_cannot_carry_is_refused_before_sending(
        self, server: FakeServer, driver: Driver, options: dict[str, Any]
    ) -> None:
        with pytest.raises(client_errors.RequestValueError, match=r"caller_id|traceparent"):
            driver.inference(server.address, lambda client: client.model("m", **options))
        assert not server.received


class TestErrors:
    def test_invalid_arguments_name_every_field(self, server: FakeServer, driver: Driver) -> None:
        violations = [
            errors.FieldViolation("spec.recipe.group_size", "must divide 576", "DOES_NOT_DIVIDE"),
            errors.FieldViolation("spec.artifact_name", "must not be empty", "REQUIRED"),
        ]
        server.on("CreateQuantizationJob", errors.InvalidArgumentError(violations))
        with pytest.raises(client_errors.InvalidArgumentError) as caught:
            driver.quantizer(server.address, lambda client: client.quantize("s3://b/m", "", request_id="r7"))
        assert caught.value.reason == "INVALID_FIELDS"
        assert [(v.field, v.description, v.reason) for v in caught.value.field_violations] == [
            (v.field, v.description, v.reason) for v in violations
        ]
        assert caught.value.request_id == "r7"

    def test_reason_and_metadata_arrive_on_a_streaming_call_too(self, server: FakeServer, driver: Driver) -> None:
        server.on("Generate", errors.NotFoundError("MODEL_NOT_FOUND", "no model m", {"model": "m"}))
        with pytest.raises(client_errors.NotFoundError) as caught:
            driver.inference(server.address, lambda client: client.generate("x", model="m"))
        assert (caught.value.reason, caught.value.metadata) == ("MODEL_NOT_FOUND", {"model": "m"})

    def test_a_refused_generation_tells_when_to_try_again_and_is_not_repeated(
        self, server: FakeServer, driver: Driver
    ) -> None:
        server.on("GenerateUnary", errors.UnavailableError("QUEUE_FULL", "full", retry_after=timedelta(seconds=3)))
        with pytest.raises(client_errors.UnavailableError) as caught:
            driver.inference(server.address, lambda client: client.generate_unary("x"))
        assert caught.value.retry_delay == timedelta(seconds=3)
        assert len(server.received["GenerateUnary"]) == 1

    def test_a_reading_call_is_repeated_while_the_server_is_unavailable(
        self, server: FakeServer, driver: Driver
    ) -> None:
        server.on("GetQuantizationJob", errors.UnavailableError("DRAINING", "draining"), job_response())
        assert driver.quantizer(server.address, lambda client: client.job("j1")).job_id == "j1"
        assert len(server.received["GetQuantizationJob"]) == 2

    def test_a_refusal_for_longer_than_one_waits_in_a_call_comes_at_once(
        self, server: FakeServer, driver: Driver
    ) -> None:
        """It would else be a deadline that passes in silence."""
        server.on("GetModel", errors.UnavailableError("MODEL_RESTARTING", "soon", retry_after=timedelta(minutes=5)))
        with pytest.raises(client_errors.UnavailableError) as caught:
            driver.inference(server.address, lambda client: client.model("m"))
        assert caught.value.retry_delay == timedelta(minutes=5)
        assert len(server.received["GetModel"]) == 1

    def test_what_removes_by_name_is_not_sent_again(self, server: FakeServer, driver: Driver) -> None:
        """The second time would answer NOT_FOUND after a first one that worked."""
        server.on("DeleteAlias", errors.UnavailableError("DRAINING", "draining", retry_after=timedelta(0)))
        with pytest.raises(client_errors.UnavailableError):
            driver.inference(server.address, lambda client: client.delete_alias("a"))
        assert len(server.received["DeleteAlias"]) == 1

    def test_no_server_at_all_is_unavailable_without_a_reason(self, server: FakeServer, driver: Driver) -> None:
        server.stop()
        with pytest.raises(client_errors.UnavailableError) as caught:
            driver.quantizer(server.address, lambda client: client.plan("s3://b/m", "m"))
        assert caught.value.reason == ""

    @pytest.mark.parametrize(
        ("use", "meant"),
        [
            (lambda client: client.generate("x", temprature=1), "temperature"),
            (lambda client: client.chat("x", tool=[]), "tools"),
            (lambda client: client.embed("x", adaptor="a"), "adapter"),
            (lambda client: client.load_model("s3://b/m", max_model_length=1), "max_model_len"),
            (lambda client: client.model("m", timout=1), "timeout"),
        ],
    )
    def test_an_unknown_option_is_a_type_error_before_anything_is_sent(
        self, server: FakeServer, driver: Driver, use: Any, meant: str
    ) -> None:
        with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
            driver.inference(server.address, use)
        assert not server.received


class TestPages:
    def test_an_iteration_asks_for_page_after_page(self, server: FakeServer, driver: Driver) -> None:
        pages = [
            quantizer_pb.ListQuantizationJobsResponse(jobs=[QuantizationJob(job_id=name)], next_page_token=token)
            for name, token in (("a", "t1"), ("b", "t2"), ("c", ""))
        ]
        server.on("ListQuantizationJobs", *pages)
        jobs = driver.quantizer(server.address, lambda client: client.jobs(["RUNNING"], page_size=1))
        assert [job.job_id for job in jobs] == ["a", "b", "c"]
        asked = [call.request for call in server.received["ListQuantizationJobs"]]
        assert [request.page_token for request in asked] == ["", "t1", "t2"]
        assert all(list(request.states) == [JobState.JOB_STATE_RUNNING] for request in asked)

    def test_artifacts_and_models_are_iterated_too(self, server: FakeServer, driver: Driver) -> None:
        server.on("ListArtifacts", artifact_pb.ListArtifactsResponse(artifacts=[Artifact(name="a")]))
        server.on("ListModels", model_pb.ListModelsResponse(models=[Model(name="m")]))
        assert [a.name for a in driver.quantizer(server.address, lambda client: client.artifacts("a"))] == ["a"]
        assert [m.name for m in driver.inference(server.address, lambda client: client.models())] == ["m"]


def test_a_message_of_many_megabytes_passes(server: FakeServer, driver: Driver) -> None:
    """gRPC's own limit is 4 MiB; the answer, not the fake server's request limit, is what the client sets."""
    server.on("Detokenize", inference_pb.DetokenizeResponse(text="x" * 20_000_000))
    assert len(driver.inference(server.address, lambda client: client.detokenize([1]))) == 20_000_000


def test_channel_credentials_are_used(driver: Driver) -> None:
    """A server with credentials is reached with the matching ones and not in plain text."""
    server = FakeServer(grpc.local_server_credentials())
    server.on("GetQuantizationJob", job_response())
    try:
        secure = grpc.local_channel_credentials()
        assert driver.quantizer(server.address, lambda client: client.job("j1"), secure=secure).job_id == "j1"
        tls = grpc.ssl_channel_credentials()
        with pytest.raises(client_errors.UnavailableError):
            driver.quantizer(server.address, lambda client: client.job("j1", timeout=5), secure=tls)
    finally:
        server.stop()
