"""The check of an artifact before it is published, with a fake in the serving engine's place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bitmill_common.artifact import Device
from bitmill_common.errors import FailedPreconditionError, UnavailableError
from bitmill_engine_kit.protocol import DeviceSupport, EngineError, VerifyRequest
from bitmill_inference import verify
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.requests.generation import Chunk, PositionLogprobs, TokenLogprob
from support.fake_inference_engine import TEXT, FakeEngine, FakeEngineFactory

CPU = DeviceSupport("cpu", 0)
AMPERE = DeviceSupport("cuda", 80)


def request(*devices: DeviceSupport) -> VerifyRequest:
    return VerifyRequest(Path("/jobs/7/model"), devices or (CPU, AMPERE))


async def test_what_the_engine_says_is_the_result() -> None:
    """And the engine is ended."""
    engines = FakeEngineFactory()
    result = await verify.verify(request(), engines)
    assert (result["text"], result["num_tokens"]) == (TEXT[: verify.NUM_TOKENS], verify.NUM_TOKENS)
    assert (result["device"], result["skipped"]) == ("cpu", "")
    (engine,) = engines.started
    assert engine.directory == Path("/jobs/7/model")
    assert engine.stopped


@pytest.mark.parametrize("server", [ServerDevice(Device.CPU), ServerDevice(Device.CUDA, 75, "Tesla T4")])
async def test_a_host_that_cannot_serve_it_says_what_is_missing_and_starts_nothing(server: ServerDevice) -> None:
    engines = FakeEngineFactory()
    engines.server_device = server
    result = await verify.verify(request(AMPERE), engines)
    assert "CUDA with compute capability 8.0 or higher" in result["skipped"]
    assert (result["num_tokens"], engines.started) == (0, [])


async def test_an_engine_that_does_not_start_fails_it_with_its_own_words() -> None:
    engines = FakeEngineFactory()
    engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "vLLM did not start: no such kernel")
    with pytest.raises(EngineError, match="no such kernel") as failure:
        await verify.verify(request(), engines)
    assert failure.value.reason == "VERIFICATION_FAILED"
    assert failure.value.metadata == {"engine_reason": "ENGINE_START_FAILED"}


def broken(engine: FakeEngine, kind: str) -> None:
    logprob = PositionLogprobs(TokenLogprob(33, "!", math.nan, 1), ())
    match kind:
        case "nan":
            engine.script = [Chunk(0, "!" * 16, [33] * 16, logprobs=[logprob] * 16)]
        case "few tokens":
            engine.script = [Chunk(0, "a", [97])]
        case "death":
            engine.failure = UnavailableError("ENGINE_DEAD", "the engine died")


@pytest.mark.parametrize(
    ("kind", "said"), [("nan", "not finite"), ("few tokens", "1 tokens"), ("death", "the engine died")]
)
async def test_an_artifact_that_does_not_generate_fails_it(kind: str, said: str) -> None:
    """And the engine is ended all the same."""

    class Engines(FakeEngineFactory):
        async def start(self, *arguments, **options):  # type: ignore[no-untyped-def]
            engine = await super().start(*arguments, **options)
            broken(engine, kind)
            return engine

    engines = Engines()
    with pytest.raises(EngineError, match=said) as failure:
        await verify.verify(request(), engines)
    assert failure.value.reason == "VERIFICATION_FAILED"
    assert engines.started[0].stopped
