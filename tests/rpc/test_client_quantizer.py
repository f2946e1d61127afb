"""Both quantizer clients against a real server: what they send, and watches that survive lost connections."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from google.protobuf import json_format

from bitmill import errors as client_errors
from bitmill import recipes
from bitmill.artifact.v1.recipe_pb2 import (
    ActivationOrder,
    AdaptiveCandidate,
    AdaptiveSearch,
    Algorithm,
    KvCacheScheme,
    ModuleRule,
    Packing,
    Scheme,
)
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb
from bitmill.quantizer.v1.quantization_job_pb2 import JobError, JobEvent, JobState, QuantizationJob
from bitmill_common import errors
from support.client_drivers import Driver
from support.fake_services import FakeServer, Hang


def watched(sequence: int, state: JobState = JobState.JOB_STATE_RUNNING) -> quantizer_pb.WatchQuantizationJobResponse:
    event = JobEvent(sequence=sequence, job=QuantizationJob(job_id="j1", state=state))
    return quantizer_pb.WatchQuantizationJobResponse(event=event)


class TestRequests:
    def test_quantize_sends_the_whole_spec(self, server: FakeServer, driver: Driver) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse(job=QuantizationJob(job_id="j")))
        job = driver.quantizer(
            server.address,
            lambda client: client.quantize(
                "s3://b/m",
                "m-w4",
                scheme="w4a16",
                algorithm="gptq",
                group_size=64,
                symmetric=False,
                ignore=["lm_head", "re:.*gate"],
                rules=[recipes.rule("re:.*down_proj", "W8A16", group_size=-1)],
                activation_order="group",
                kv_cache="fp8",
                smoothing_strength=0,
                adaptive=recipes.adaptive([recipes.candidate("W8A16")], max_size_bytes=9, num_samples=4),
                dampening_frac=0.05,
                seed=7,
                calibration_uri="s3://b/c.jsonl",
                num_samples=32,
                max_sequence_length=512,
                packing="truncate",
                engine="gptqmodel",
                evaluation_tokens=1024,
                engine_options={
                    "max_model_len": 4096,
                    "batch_timeout": timedelta(milliseconds=20),
                    "hf_overrides": {"sliding_window": 64},
                },
            ),
        )
        spec = server.only_call("CreateQuantizationJob").request.spec
        assert job.job_id == "j"
        assert (spec.source_uri, spec.artifact_name) == ("s3://b/m", "m-w4")
        recipe = spec.recipe
        assert (recipe.scheme, recipe.group_size, recipe.symmetric) == (Scheme.SCHEME_W4A16, 64, False)
        assert (list(recipe.ignore), recipe.dampening_frac, recipe.seed) == (["lm_head", "re:.*gate"], 0.05, 7)
        assert (recipe.algorithm, recipe.activation_order) == (
            Algorithm.ALGORITHM_GPTQ,
            ActivationOrder.ACTIVATION_ORDER_GROUP,
        )
        assert recipe.kv_cache == KvCacheScheme.KV_CACHE_SCHEME_FP8
        assert recipe.HasField("smoothing_strength")
        assert list(recipe.rules) == [
            ModuleRule(pattern="re:.*down_proj", scheme=Scheme.SCHEME_W8A16, group_size=-1),
        ]
        candidate = AdaptiveCandidate(scheme=Scheme.SCHEME_W8A16)
        assert recipe.adaptive == AdaptiveSearch(candidates=[candidate], max_size_bytes=9, num_samples=4)
        assert (spec.calibration.packing, spec.engine) == (Packing.PACKING_TRUNCATE, "gptqmodel")
        calibration = spec.calibration
        assert (calibration.uri, calibration.num_samples) == ("s3://b/c.jsonl", 32)
        assert (calibration.max_sequence_length, spec.evaluation.num_tokens) == (512, 1024)
        assert json_format.MessageToDict(spec.engine_options) == {
            "max_model_len": 4096,
            "batch_timeout": 0.02,
            "hf_overrides": {"sliding_window": 64},
        }

    def test_a_misspelt_engine_option_says_what_was_meant(self, server: FakeServer, driver: Driver) -> None:
        with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
            driver.quantizer(
                server.address,
                lambda client: client.quantize("s3://b/m", "m", engine_options={"max_model_length": 1}),
            )
        assert not server.received

    def test_what_is_not_given_stays_unset(self, server: FakeServer, driver: Driver) -> None:
        server.on("CreateQuantizationJob", quantizer_pb.CreateQuantizationJobResponse())
        driver.quantizer(server.address, lambda client: client.quantize("s3://b/m", "m", scheme="W8A8_INT8"))
        spec = server.only_call("CreateQuantizationJob").request.spec
        assert not spec.HasField("calibration")
        assert not spec.HasField("evaluation")
        assert not spec.HasField("engine_options")
        assert not spec.recipe.HasField("group_size")


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
