"""The server's numbers for Prometheus, at `/metrics`: those of GetLoad, and of every call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bitmill_common.errors import UnavailableError
from bitmill_common.server import check_exposure
from bitmill_inference.models.load import LoadReport, ModelNumbers
from bitmill_inference.models.model import ModelState

log = structlog.get_logger("bitmill.server")

PREFIX = "bitmill_inference_"
# A scrape waits no longer for the event loop.
SCRAPE_TIMEOUT_S = 10

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)


class Metrics:
    """Counts calls as they end and reads everything else when it is asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Histogram(
            f"{PREFIX}grpc_call_duration_seconds",
            "Duration of the gRPC calls that have ended, by method and status code.",
            ("method", "code"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_tokens = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "Time from a streaming call's admission check to its first chunk.",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def call_ended(self, method: str, code: Enum, seconds: float) -> None:
        """Notes a call; `method` is its full name, `/package.Service/Method`."""
        self._calls.labels(method.lstrip("/"), code.name).observe(seconds)

    def first_token(self, model: str, seconds: float) -> None:
        """Notes how long a stream took to begin."""
        self._first_tokens.labels(model).observe(seconds)

    def serve(self, address: str, report: LoadReport, *, insecure: bool) -> int:
        """Answers `http://<address>/metrics` from a thread until `close`, and returns the port.

        Raises `FailedPreconditionError` for an address that others can reach unless `insecure`, and
        `UnavailableError` when the address is taken.
        """
        check_exposure(address, insecure)
        host, _, port = address.rpartition(":")
        try:
            self._server = start_http_server(int(port), host.strip("[]"), registry=self._registry)
        except (OSError, OverflowError, ValueError) as error:
            raise UnavailableError("ADDRESS_UNAVAILABLE", f"cannot bind {address}: {error}") from error
        self._registry.register(_LoadCollector(report, asyncio.get_running_loop()))
        log.info("metrics_started", address=f"{host}:{self._server[0].server_port}")
        return int(self._server[0].server_port)

    async def close(self) -> None:
        """Stops answering. Without effect when nothing is served."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            await asyncio.to_thread(server.shutdown)
            await asyncio.to_thread(thread.join)
            server.server_close()


class _LoadCollector(Collector):
    """Reads the models on the event loop, where nothing changes them meanwhile."""

    def __init__(self, report: LoadReport, loop: asyncio.AbstractEventLoop) -> None:
        self._report = report
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Called by a scrape, in its thread."""
        numbers = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)
        return _families(numbers)

    async def _read(self) -> Sequence[ModelNumbers]:
        return self._report.numbers()


def _families(models: Sequence[ModelNumbers]) -> Iterator[Metric]:
    yield _gauge(
        "model_serving",
        "1 while the model answers calls.",
        [(each.load.model, float(each.load.state is ModelState.SERVING)) for each in models],
    )
    yield _gauge(
        "running_requests",
        "Requests in the engine's steps.",
        [(each.load.model, each.load.running_requests) for each in models],
    )
    yield _gauge(
        "waiting_requests",
        "Requests that wait for a place in them.",
        [(each.load.model, each.load.waiting_requests) for each in models],
    )
    yield _gauge(
        "kv_cache_usage_ratio",
        "Fraction of the KV cache in use, from 0 to 1.",
        [(each.load.model, each.load.kv_cache_usage) for each in models],
    )
    yield _counter(
        "prompt_tokens",
        "Prompt tokens since the engine started.",
        [(each.load.model, each.engine.prompt_tokens) for each in models],
    )
    yield _counter(
        "generation_tokens",
        "Generated tokens since the engine started.",
        [(each.load.model, each.engine.generation_tokens) for each in models],
    )
    refused = CounterMetricFamily(
        f"{PREFIX}refused_calls",
        "Calls refused because a queue or a caller's share was full, since the model was loaded.",
        labels=("model", "reason"),
    )
    for each in models:
        for reason, count in sorted(each.refused.items()):
            refused.add_metric((each.load.model, reason), count)
    yield refused


def _gauge(name: str, text: str, values: Sequence[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=("model",))
    for model, value in values:
        family.add_metric((model,), value)
    return family


def _counter(name: str, text: str, values: Sequence[tuple[str, float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=("model",))
    for model, value in values:
        family.add_metric((model,), value)
    return family
