"""Loads that do not fit this server's memory, with a fake engine behind the port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import model_pb2
from bitmill_common.artifact import Device
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.memory import GIB, DeviceMemory, ServerMemory
from support.inference_serving import Serving, error_info, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as server:
        yield server


async def test_a_cache_larger_than_the_host_is_refused_with_numbers(server: Serving) -> None:
    """RESOURCE_EXHAUSTED before anything is started; with less the same model loads."""
    server.engines.server_memory = ServerMemory(8 * GIB)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(kv_cache_memory_bytes=9 * GIB)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    info = error_info(caught.value)
    assert info.reason == "INSUFFICIENT_MEMORY"
    assert (info.metadata["available_bytes"], info.metadata["kv_cache_bytes"]) == (str(8 * GIB), str(9 * GIB))
    parts = ("weights_bytes", "kv_cache_bytes", "overhead_bytes")
    assert int(info.metadata["needed_bytes"]) == sum(int(info.metadata[part]) for part in parts)
    assert not server.engines.starting.is_set()
    model = await server.get()
    assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_FAILED, "INSUFFICIENT_MEMORY")
    assert (await server.load(kv_cache_memory_bytes=GIB)).state == model_pb2.MODEL_STATE_SERVING


async def test_copies_of_a_model_count_each(server: Serving) -> None:
    """Each has a cache of its own."""
    server.engines.server_device = ServerDevice(Device.CPU, count=2)
    server.engines.server_memory = ServerMemory(8 * GIB)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load(kv_cache_memory_bytes=5 * GIB, data_parallel_size=2)
    assert error_info(caught.value).metadata["kv_cache_bytes"] == str(10 * GIB)


async def test_weights_that_do_not_fit_the_gpu_are_refused_with_numbers(server: Serving) -> None:
    """By the header of its files, which are not read."""
    server.engines.server_device = ServerDevice(Device.CUDA, 90)
    server.engines.server_memory = ServerMemory(GIB, (DeviceMemory(GIB, 1000),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.load()
    metadata = error_info(caught.value).metadata
    assert (metadata["free_bytes"], metadata["available_bytes"]) == ("1000", "1000")
    assert int(metadata["weights_bytes"]) > 1000
