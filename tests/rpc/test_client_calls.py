"""Both clients, sync and async, against a real server: deadlines, ids, errors, pages, streams, watches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import pytest

from bitmill import errors as client_errors
from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.artifact.v1.recipe_pb2 import Scheme
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.generation_pb2 import Finish, FinishReason, Usage
from bitmill.inference.v1.model_pb2 import Model, ModelState
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb
from bitmill.quantizer.v1.quantization_job_pb2 import JobError, JobEvent, JobState, QuantizationJob
from bitmill_common import errors
from support.client_drivers import AsyncDriver, SyncDriver
from support.fake_services import FakeServer, Hang

Driver = SyncDriver | AsyncDriver


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param()
    return driver


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

    def test_no_server_at_all_is_unavailable_without_a_reason(self, server: FakeServer, driver: Driver) -> None:
        server.stop()
        with pytest.raises(client_errors.UnavailableError) as caught:
            driver.quantizer(server.address, lambda client: client.plan("s3://b/m", "m"))
        assert caught.value.reason == ""

    def test_an_unknown_sampling_option_is_a_type_error_before_anything_is_sent(
        self, server: FakeServer, driver: Driver
    ) -> None:
        with pytest.raises(TypeError, match="did you mean 'temperature'"):
            driver.inference(server.address, lambda client: client.generate("x", temprature=1))
        assert not server.received


class TestRequests:
    def test_quantize_sends_the_whole_spec(self, server: FakeServer, driver: Driver) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=QuantizationJob(job_id="j")))
        job = driver.quantizer(
            server.address,
            lambda client: client.quantize(
                "s3://b/m",
                "m-w4",
                scheme="w4a16",
                group_size=64,
                symmetric=False,
                ignore=["lm_head", "re:.*gate"],
                dampening_frac=0.05,
                seed=7,
                calibration_uri="s3://b/c.jsonl",
                num_samples=32,
                max_sequence_length=512,
                evaluation_tokens=1024,
            ),
        )
        spec = server.only_call("CreateQuantizationJob").request.spec
        assert job.job_id == "j"
        assert (spec.source_uri, spec.artifact_name) == ("s3://b/m", "m-w4")
        recipe = spec.recipe
        assert (recipe.scheme, recipe.group_size, recipe.symmetric) == (Scheme.SCHEME_W4A16, 64, False)
        assert (list(recipe.ignore), recipe.dampening_frac, recipe.seed) == (["lm_head", "re:.*gate"], 0.05, 7)
        calibration = spec.calibration
        assert (calibration.uri, calibration.num_samples) == ("s3://b/c.jsonl", 32)
        assert (calibration.max_sequence_length, spec.evaluation.num_tokens) == (512, 1024)

    def test_what_is_not_given_stays_unset(self, server: FakeServer, driver: Driver) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse())
        driver.quantizer(server.address, lambda client: client.quantize("s3://b/m", "m", scheme="W8A8_INT8"))
        spec = server.only_call("CreateQuantizationJob").request.spec
        assert not spec.HasField("calibration")
        assert not spec.HasField("evaluation")
        assert not spec.recipe.HasField("group_size")

    def test_a_prompt_is_text_or_token_ids(self, server: FakeServer, driver: Driver) -> None:
        server.on("Generate", [inference_pb.GenerateResponse()])
        driver.inference(server.address, lambda client: client.generate("text", max_tokens=3, stop="\n"))
        driver.inference(server.address, lambda client: client.generate([1, 2, 3]))
        text, ids = (call.request for call in server.received["Generate"])
        assert (text.text, text.sampling_params.max_tokens, text.sampling_params.stop) == ("text", 3, ["\n"])
        assert list(ids.token_ids.ids) == [1, 2, 3]
        assert not ids.HasField("sampling_params")

    def test_a_conversation_is_text_or_messages(self, server: FakeServer, driver: Driver) -> None:
        server.on("ChatUnary", inference_pb.ChatUnaryResponse())
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        driver.inference(server.address, lambda client: client.chat_unary("hi"))
        driver.inference(server.address, lambda client: client.chat_unary(messages))
        alone, whole = (call.request.messages for call in server.received["ChatUnary"])
        assert [(message.role, message.content) for message in alone] == [("user", "hi")]
        assert [(message.role, message.content) for message in whole] == [("system", "be brief"), ("user", "hi")]

    def test_tokenize_and_detokenize(self, server: FakeServer, driver: Driver) -> None:
        server.on("Tokenize", inference_pb.TokenizeResponse(token_ids=[5, 6], max_model_len=2048))
        server.on("Detokenize", inference_pb.DetokenizeResponse(text="hi"))
        tokens = driver.inference(server.address, lambda client: client.tokenize("hi", add_special_tokens=False))
        assert list(tokens.token_ids) == [5, 6]
        assert server.only_call("Tokenize").request.HasField("add_special_tokens")
        assert driver.inference(server.address, lambda client: client.detokenize([5, 6])) == "hi"

    def test_a_model_is_loaded_with_engine_options(self, server: FakeServer, driver: Driver) -> None:
        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m", state=ModelState.MODEL_STATE_SERVING)))
        model = driver.inference(
            server.address, lambda client: client.load_model("s3://b/a", name="m", max_model_len=512)
        )
        assert model.state == ModelState.MODEL_STATE_SERVING
        assert server.only_call("LoadModel").request.engine_options.max_model_len == 512


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


class TestStreams:
    def test_chunks_arrive_as_they_are_sent(self, server: FakeServer, driver: Driver) -> None:
        finish = Finish(reason=FinishReason.FINISH_REASON_STOP)
        chunks = [
            inference_pb.GenerateResponse(text="Once"),
            inference_pb.GenerateResponse(text=" upon", finish=finish, usage=Usage(completion_tokens=2)),
        ]
        server.on("Generate", chunks)
        assert driver.inference(server.address, lambda client: client.generate("x")) == chunks

    def test_leaving_a_stream_cancels_the_call(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Generate", [inference_pb.GenerateResponse(text="a"), hang])

        def use(client: Any) -> str:
            with client.generate("x") as stream:
                text = str(next(stream).text)
                assert hang.reached.wait(10)
                return text

        assert SyncDriver().inference(server.address, use) == "a"
        assert hang.release.wait(10)

    def test_leaving_an_async_stream_cancels_the_call(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Chat", [inference_pb.ChatResponse(content="a"), hang])

        async def use(client: Any) -> str:
            async with client.chat("x") as stream:
                content = str((await anext(stream)).content)
                assert await asyncio.to_thread(hang.reached.wait, 10)
                return content

        assert AsyncDriver().inference(server.address, use) == "a"
        assert hang.release.wait(10)


class TestWatch:
    def test_it_yields_events_up_to_the_final_state(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", [watched(1), watched(2, JobState.JOB_STATE_SUCCEEDED)])
        events = driver.quantizer(server.address, lambda client: client.watch("j1"))
        assert [event.sequence for event in events] == [1, 2]

    def test_a_dropped_stream_is_resumed_from_the_last_event_seen(self, server: FakeServer, driver: Driver) -> None:
        """That event is asked for again, as a sign of life, and yielded once."""
        server.on(
            "WatchQuantizationJob",
            [watched(1), watched(2), errors.UnavailableError("DRAINING", "draining", retry_after=timedelta(0))],
            [watched(2), watched(3, JobState.JOB_STATE_SUCCEEDED)],
        )
        events = driver.quantizer(server.address, lambda client: client.watch("j1"))
        assert [event.sequence for event in events] == [1, 2, 3]
        assert [call.request.after_sequence for call in server.received["WatchQuantizationJob"]] == [0, 1]

    def test_it_survives_a_restart_of_the_server(self, server: FakeServer, driver: Driver) -> None:
        hang = Hang()
        server.on("WatchQuantizationJob", [watched(1), hang], [watched(2, JobState.JOB_STATE_SUCCEEDED)])
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(driver.quantizer, server.address, lambda client: client.watch("j1"))
            assert hang.reached.wait(30)
            server.restart()
            assert [event.sequence for event in watching.result(60)] == [1, 2]
        assert server.received["WatchQuantizationJob"][-1].request.after_sequence == 0

    def test_a_stream_that_ends_before_the_job_is_resumed(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", [watched(1)], [watched(2, JobState.JOB_STATE_FAILED)])
        events = driver.quantizer(server.address, lambda client: client.watch("j1"))
        assert [event.sequence for event in events] == [1, 2]

    def test_it_gives_up_when_the_server_stays_away(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", [watched(1)], errors.UnavailableError("DRAINING", "draining"))
        with pytest.raises(client_errors.UnavailableError):
            driver.quantizer(server.address, lambda client: client.watch("j1", reconnect_timeout=0.1))

    def test_other_errors_end_it_at_once(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", errors.NotFoundError("JOB_NOT_FOUND", "no job j1"))
        with pytest.raises(client_errors.NotFoundError):
            driver.quantizer(server.address, lambda client: client.watch("j1"))
        assert len(server.received["WatchQuantizationJob"]) == 1

    def test_wait_returns_the_final_job(self, server: FakeServer, driver: Driver) -> None:
        server.on("WatchQuantizationJob", [watched(1), watched(2, JobState.JOB_STATE_SUCCEEDED)])
        job = driver.quantizer(server.address, lambda client: client.wait("j1"))
        assert job.state == JobState.JOB_STATE_SUCCEEDED

    def test_wait_raises_for_a_job_that_failed_unless_told_not_to(self, server: FakeServer, driver: Driver) -> None:
        event = watched(1, JobState.JOB_STATE_FAILED)
        event.event.job.error.CopyFrom(JobError(reason="ENGINE_KILLED", message="out of memory"))
        server.on("WatchQuantizationJob", [event])
        with pytest.raises(client_errors.JobNotSucceededError, match="ENGINE_KILLED: out of memory"):
            driver.quantizer(server.address, lambda client: client.wait("j1"))
        job = driver.quantizer(server.address, lambda client: client.wait("j1", check=False))
        assert job.error.reason == "ENGINE_KILLED"

    def test_a_model_is_watched_until_unloaded(self, server: FakeServer, driver: Driver) -> None:
        states = [ModelState.MODEL_STATE_LOADING, ModelState.MODEL_STATE_UNLOADED]
        server.on("WatchModel", [model_pb.WatchModelResponse(model=Model(name="m", state=state)) for state in states])
        models = driver.inference(server.address, lambda client: client.watch_model("m"))
        assert [model.state for model in models] == states


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
