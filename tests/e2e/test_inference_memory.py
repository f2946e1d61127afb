"""Loads that do not fit this very host's memory."""

from __future__ import annotations

from pathlib import Path

import grpc
import psutil
import pytest

from bitmill.inference.v1 import model_pb2
from support.inference_process import InferenceProcess
from support.inference_serving import error_info


def test_a_cache_larger_than_the_host_is_refused_before_an_engine_starts(
    inference_server: InferenceProcess, tiny_checkpoint: Path
) -> None:
    """With what is needed and what is there; no process is started."""
    cores = inference_server.engine_cores()
    size = psutil.virtual_memory().total + psutil.swap_memory().total
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.load("huge", tiny_checkpoint, kv_cache_memory_bytes=size)
    try:
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_info(caught.value)
        assert (info.reason, info.metadata["kv_cache_bytes"]) == ("INSUFFICIENT_MEMORY", str(size))
        assert 0 < int(info.metadata["available_bytes"]) < size < int(info.metadata["needed_bytes"])
        model = inference_server.get("huge")
        assert (model.state, model.error.reason) == (model_pb2.MODEL_STATE_FAILED, "INSUFFICIENT_MEMORY")
        assert inference_server.engine_cores() == cores
    finally:
        inference_server.unload("huge")
