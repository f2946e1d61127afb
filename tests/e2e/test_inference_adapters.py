"""Adapters (LoRA) in a real engine: what they do to its output, alone and in one batch, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2, model_pb2, model_service_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.adapters import write_adapter
from support.inference_process import LOAD_TIMEOUT_S, STOP_TIMEOUT_S, InferenceProcess
from support.inference_serving import error_info

MODEL = "adaptable"
CALL_TIMEOUT_S = 120
# Of the tied checkpoint. So strong that the output is the adapter's: alpha / rank times products of about 0.0004.
MODULES = {
    f"model.layers.{layer}.{module}": sizes
    for layer in range(2)
    for module, sizes in {
        "self_attn.q_proj": (64, 64),
        "self_attn.v_proj": (64, 32),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (64, 128),
        "mlp.down_proj": (128, 64),
    }.items()
}
ALPHA = 4000.0


@pytest.fixture(scope="module")
def adaptable(inference_server: InferenceProcess, tiny_checkpoint: Path) -> Iterator[InferenceProcess]:
    """The server, with a model that takes two adapters in one step, and one more in its memory."""
    inference_server.load(MODEL, tiny_checkpoint, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8)
    yield inference_server
    inference_server.unload(MODEL)


def load(server: InferenceProcess, directory: Path) -> None:
    request = model_service_pb2.LoadAdapterRequest(model=MODEL, uri=directory.as_uri())
    server.models.LoadAdapter(request, timeout=CALL_TIMEOUT_S)


def unload(server: InferenceProcess, name: str) -> None:
    request = model_service_pb2.UnloadAdapterRequest(model=MODEL, name=name)
    server.models.UnloadAdapter(request, timeout=STOP_TIMEOUT_S)


def generate(server: InferenceProcess, adapter: str = "") -> Sequence[int]:
    request = pb.GenerateUnaryRequest(
        model=MODEL,
        text="The library reads each file once and keeps",
        sampling_params=generation_pb2.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        request_options=generation_pb2.RequestOptions(adapter=adapter),
    )
    return tuple(server.inference.GenerateUnary(request, timeout=CALL_TIMEOUT_S).sequences[0].token_ids)


def test_adapters_and_the_model_share_a_batch(adaptable: InferenceProcess, tmp_path: Path) -> None:
    """Each says the same together as alone, and something else than the others; three by turns with room for two."""
    names = ("first", "second", "third")
    for seed, name in enumerate(names):
        load(adaptable, write_adapter(tmp_path / name, MODULES, rank=8, alpha=ALPHA, seed=seed))
    alone = {name: generate(adaptable, name) for name in ("", *names)}
    assert len(set(alone.values())) == 4
    with ThreadPoolExecutor(12) as threads:
        together = [(name, threads.submit(generate, adaptable, name)) for name in ("", *names) * 3]
        assert [(name, output.result()) for name, output in together] == [
            (name, alone[name]) for name in ("", *names) * 3
        ]
    shown = {adapter.name: (adapter.rank, adapter.running_calls) for adapter in adaptable.get(MODEL).adapters}
    assert shown == dict.fromkeys(names, (8, 0))

    # A name that comes back with other files takes nothing from the cache of the one before.
    unload(adaptable, "first")
    with pytest.raises(grpc.RpcError) as caught:
        generate(adaptable, "first")
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    load(adaptable, write_adapter(tmp_path / "again" / "first", MODULES, rank=8, alpha=ALPHA, seed=7))
    assert generate(adaptable, "first") not in alone.values()
    assert generate(adaptable) == alone[""]
    for name in names:
        unload(adaptable, name)


def test_an_adapter_does_not_need_its_source_any_more(adaptable: InferenceProcess, tmp_path: Path) -> None:
    """The engine reads it again from the copy, after others have pushed it out of its memory."""
    names = ("one", "two", "three")
    outputs = {}
    for seed, name in enumerate(names):
        directory = write_adapter(tmp_path / name, MODULES, rank=8, alpha=ALPHA, seed=seed)
        load(adaptable, directory)
        outputs[name] = generate(adaptable, name)
        (directory / "adapter_model.safetensors").write_bytes(b"")
    for name in names:
        assert generate(adaptable, name) == outputs[name]
        unload(adaptable, name)


def test_an_adapter_that_vllm_refuses_harms_nothing(adaptable: InferenceProcess, tmp_path: Path) -> None:
    """It says why, and the engine serves on; what we check ourselves does not reach it."""
    before = generate(adaptable)
    # A module of the checkpoint that vLLM does not adapt.
    refused = write_adapter(tmp_path / "norm", {"model.layers.0.input_layernorm": (64, 64)}, rank=8)
    with pytest.raises(grpc.RpcError) as caught:
        load(adaptable, refused)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(caught.value).reason == "ADAPTER_REFUSED"
    assert "input_layernorm" in caught.value.details()
    wide = write_adapter(tmp_path / "wide", {"model.layers.0.self_attn.q_proj": (64, 128)}, rank=8)
    with pytest.raises(grpc.RpcError) as caught:
        load(adaptable, wide)
    assert error_info(caught.value).reason == "ADAPTER_INCOMPATIBLE"
    plain = write_adapter(tmp_path / "plain", MODULES, rank=8, alpha=0, config={"lora_alpha": 0})
    load(adaptable, plain)
    assert generate(adaptable, "plain") == generate(adaptable) == before
    assert json.loads((plain / "adapter_config.json").read_text())["lora_alpha"] == 0
    unload(adaptable, "plain")


def test_calls_about_adapters_end_when_the_engine_dies(adaptable: InferenceProcess, tmp_path: Path) -> None:
    """vLLM would leave them open for ever, and with them the model's unload and the server's end."""
    for name in ("kept", "removed"):
        load(adaptable, write_adapter(tmp_path / name, MODULES, rank=8))
    adding = model_service_pb2.LoadAdapterRequest(
        model=MODEL, uri=write_adapter(tmp_path / "added", MODULES, rank=8).as_uri()
    )
    removing = model_service_pb2.UnloadAdapterRequest(model=MODEL, name="removed")
    core = max(adaptable.engine_cores(), key=lambda core: core.create_time())
    core.suspend()
    added = adaptable.models.LoadAdapter.future(adding, timeout=CALL_TIMEOUT_S)
    removed = adaptable.models.UnloadAdapter.future(removing, timeout=CALL_TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        load(adaptable, tmp_path / "removed")
    assert error_info(caught.value).reason == "ADAPTER_DRAINING"
    core.kill()
    removed.result()
    assert added.exception().code() == grpc.StatusCode.UNAVAILABLE
    watch = adaptable.models.WatchModel(model_service_pb2.WatchModelRequest(name=MODEL), timeout=LOAD_TIMEOUT_S)
    states = (response.model.state for response in watch)
    assert model_pb2.MODEL_STATE_RESTARTING in states
    assert model_pb2.MODEL_STATE_SERVING in states
    assert [adapter.name for adapter in adaptable.get(MODEL).adapters] == ["kept"]
    assert generate(adaptable, "kept")
    unload(adaptable, "kept")
