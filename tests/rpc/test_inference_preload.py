"""Models that the server loads at its start, and the server's own health meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.preload import ModelRequest, preload
from bitmill_inference.servicers.convert_model import preload_requests
from support.inference_serving import SERVICE, TIMEOUT_S, Serving, serving

MODEL_SERVICE = "bitmill.inference.v1.ModelService"


async def health(server: Serving, service: str = "") -> bool:
    answer = await server.health.Check(health_pb2.HealthCheckRequest(service=service))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_models_are_named_in_a_list_or_in_json() -> None:
    """JSON takes every field of LoadModel."""
    assert preload_requests("") == []
    assert preload_requests("a=file:///m/a, b=s3://x/b?c=d") == [
        ModelRequest("a", "file:///m/a"),
        ModelRequest("b", "s3://x/b?c=d"),
    ]
    items = [
        "a=file:///m/a",
        {
            "name": "b",
            "uri": "file:///m/b",
            "engine_options": {"max_num_seqs": 4, "batch_timeout": "0.5s", "hf_overrides": {"sliding_window": 64}},
            "aliases": ["chat"],
            "unload_replaced": True,
        },
    ]
    options = EngineOptions(max_num_seqs=4, batch_timeout=0.5, hf_overrides={"sliding_window": 64})
    assert preload_requests(json.dumps(items)) == [
        ModelRequest("a", "file:///m/a"),
        ModelRequest("b", "file:///m/b", options, ("chat",), unload_replaced=True),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=file:///a",
        "a=",
        "a=file:///a,a=file:///b",
        "[1]",
        '[{"uri": "file:///a"}]',
        '[{"nam": "a"}]',
        "[",
        "[[]]",
    ],
)
def test_what_names_no_model_is_refused(text: str) -> None:
    """With a ValueError, which ends the start."""
    with pytest.raises(ValueError, match=r"\S"):
        preload_requests(text)


async def test_the_server_is_healthy_when_every_model_serves(tmp_path: Path) -> None:
    """It answers from the first moment; ModelService does at once."""
    async with serving(tmp_path, awaited=["a", "b"]) as server:
        server.engines.gate.clear()
        requests = [ModelRequest(name, server.checkpoint_uri, aliases=(f"{name}-chat",)) for name in ("a", "b")]
        loading = asyncio.create_task(preload(server.registry, requests))
        await asyncio.wait_for(server.engines.starting.wait(), TIMEOUT_S)
        assert [await health(server, name) for name in ("", SERVICE, MODEL_SERVICE)] == [False, False, True]
        server.engines.gate.set()
        await loading
        assert [await health(server, name) for name in ("", SERVICE, f"{SERVICE}/a-chat")] == [True, True, True]
        await server.unload("a")
        assert await health(server)


async def test_a_model_that_fails_leaves_the_server_unhealthy_until_it_is_loaded(tmp_path: Path) -> None:
    """The others serve all the same, and the server lives."""
    async with serving(tmp_path, awaited=["a", "b", "c"]) as server:
        requests = [
            ModelRequest("a", server.checkpoint_uri),
            ModelRequest("b", (server.checkpoint / "nothing").as_uri()),
            ModelRequest("c", "http://nonsense"),
        ]
        await preload(server.registry, requests)
        assert [model.name for model in await server.list()] == ["a", "b"]
        assert await server.is_serving("a")
        assert not await health(server)
        await server.load("b")
        assert not await health(server)
        await server.load("c")
        assert await health(server)


async def test_a_server_without_such_models_is_healthy_at_once(tmp_path: Path) -> None:
    """As there is nothing to wait for."""
    async with serving(tmp_path) as server:
        assert [await health(server, name) for name in ("", SERVICE, MODEL_SERVICE)] == [True, True, True]
