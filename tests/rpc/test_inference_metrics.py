"""The metrics that a Prometheus server scrapes."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common.errors import FailedPreconditionError, UnavailableError
from bitmill_inference.metrics import Metrics
from bitmill_inference.models.load import LoadReport
from support.fake_inference_engine import TEXT
from support.inference_serving import SERVICE, TIMEOUT_S, Serving, serving


class Scraped:
    """A running server and what its metrics say."""

    def __init__(self, server: Serving, port: int) -> None:
        self.server = server
        self.port = port

    async def values(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Every sample by its name without the prefix, and the values of its labels in the order of their names."""
        text = await asyncio.to_thread(self._get)
        return {
            (sample.name.removeprefix("bitmill_inference_"), tuple(map(sample.labels.get, sorted(sample.labels)))): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def _get(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=TIMEOUT_S) as response:
            return str(response.read().decode())


@pytest.fixture
async def report(tmp_path: Path) -> AsyncIterator[LoadReport]:
    async with serving(tmp_path) as server:
        yield server.load_report


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[Scraped]:
    metrics = Metrics()
    async with serving(
        tmp_path, caller_limit=1, on_call=metrics.call_ended, on_first_token=metrics.first_token
    ) as server:
        port = metrics.serve("127.0.0.1:0", server.load_report, insecure=False)
        try:
            yield Scraped(server, port)
        finally:
            await metrics.close()


async def test_they_are_the_numbers_of_getload(scraped: Scraped) -> None:
    server = scraped.server
    await server.load(max_num_seqs=1)
    server.engine.kv_cache_usage = 0.5
    before = await scraped.values()
    server.engine.gate.clear()
    request = pb.GenerateUnaryRequest(text="hi")
    calls = [
        server.inference.GenerateUnary(request, metadata=(("x-caller-id", name),), timeout=TIMEOUT_S) for name in "ab"
    ]
    while (values := await scraped.values())["waiting_requests", ("tiny",)] != 1:
        pass
    assert values["running_requests", ("tiny",)] == 1
    assert values["kv_cache_usage_ratio", ("tiny",)] == 0.5
    assert values["model_serving", ("tiny",)] == 1
    with pytest.raises(grpc.aio.AioRpcError):
        await server.inference.GenerateUnary(request, metadata=(("x-caller-id", "a"),), timeout=TIMEOUT_S)
    server.engine.gate.set()
    await asyncio.gather(*calls)
    after = await scraped.values()
    for name, tokens in (("generation_tokens_total", len(TEXT)), ("prompt_tokens_total", len("hi") + 1)):
        assert after[name, ("tiny",)] - before[name, ("tiny",)] == 2 * tokens
    assert after["refused_calls_total", ("tiny", "CALLER_LIMIT")] == 1
    assert after["running_requests", ("tiny",)] == after["waiting_requests", ("tiny",)] == 0


async def test_calls_are_counted_by_method_and_code(scraped: Scraped) -> None:
    server = scraped.server
    await server.load()
    for text in ("hi", "", "ho"):
        await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=text), timeout=TIMEOUT_S).code()
    async for _ in server.inference.Generate(pb.GenerateRequest(text="hi"), timeout=TIMEOUT_S):
        pass
    values = await scraped.values()
    calls = "grpc_call_duration_seconds_count"
    assert values[calls, ("OK", f"{SERVICE}/GenerateUnary")] == 2
    assert values[calls, ("INVALID_ARGUMENT", f"{SERVICE}/GenerateUnary")] == 1
    assert values[calls, ("OK", f"{SERVICE}/Generate")] == 1
    assert values["grpc_call_duration_seconds_sum", ("OK", f"{SERVICE}/Generate")] > 0
    assert values["time_to_first_token_seconds_count", ("tiny",)] == 1


async def test_a_model_that_is_gone_has_no_numbers(scraped: Scraped) -> None:
    await scraped.server.load()
    await scraped.server.unload()
    values = await scraped.values()
    assert ("running_requests", ("tiny",)) not in values


async def test_a_model_without_an_engine_does_not_serve(scraped: Scraped) -> None:
    scraped.server.engines.failure = FailedPreconditionError("ENGINE_START_FAILED", "no")
    with pytest.raises(grpc.aio.AioRpcError):
        await scraped.server.load()
    assert (await scraped.values())["model_serving", ("tiny",)] == 0


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "192.0.2.1:0"])
async def test_an_address_that_others_reach_is_refused(report: LoadReport, address: str) -> None:
    with pytest.raises(FailedPreconditionError, match="--insecure"):
        Metrics().serve(address, report, insecure=False)


async def test_said_aloud_it_is_served(report: LoadReport) -> None:
    metrics = Metrics()
    assert metrics.serve("0.0.0.0:0", report, insecure=True) > 0
    await metrics.close()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:port"])
async def test_an_address_that_cannot_be_bound_is_unavailable(report: LoadReport, address: str) -> None:
    with pytest.raises(UnavailableError, match="cannot bind"):
        Metrics().serve(address, report, insecure=False)


async def test_an_address_that_is_taken_is_unavailable_and_once_closed_it_is_free(report: LoadReport) -> None:
    """Closing twice is no error."""
    first, second = Metrics(), Metrics()
    port = first.serve("127.0.0.1:0", report, insecure=False)
    with pytest.raises(UnavailableError, match="cannot bind"):
        second.serve(f"127.0.0.1:{port}", report, insecure=False)
    await first.close()
    await first.close()
    assert second.serve(f"127.0.0.1:{port}", report, insecure=False) == port
    await second.close()
