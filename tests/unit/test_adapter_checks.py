"""Which adapters fit which models, by configuration and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.errors import FailedPreconditionError
from bitmill_common.object_store import ObjectStore
from bitmill_common.safetensors import TensorInfo
from bitmill_common.stores import Stores
from bitmill_inference.models.adapter_checks import check_adapter
from support.adapters import write_adapter
from support.checkpoints import write_safetensors

URI = "s3://bucket/adapter"
PLAIN = {"model.layers.0.self_attn.q_proj.weight": (64, 32)}


def base(shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    tensors = {name: TensorInfo("BF16", shape, "model.safetensors") for name, shape in shapes.items()}
    return Checkpoint({}, "LlamaForCausalLM", tensors, (), 0, 0, None)


def store(directory: Path) -> ObjectStore:
    return Stores([directory.as_uri()]).open(directory.as_uri(), "uri")


def check(directory: Path, shapes: Mapping[str, tuple[int, ...]] = PLAIN, max_rank: int = 16) -> int:
    return check_adapter(store(directory), URI, base(shapes), max_rank)


def problems(directory: Path, shapes: Mapping[str, tuple[int, ...]] = PLAIN) -> str:
    with pytest.raises(FailedPreconditionError) as caught:
        check(directory, shapes)
    assert caught.value.reason == "ADAPTER_INCOMPATIBLE"
    return caught.value.metadata["problems"]


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param({"model.layers.0.self_attn.q_proj.weight_packed": (64, 4)}, id="compressed-tensors"),
        pytest.param(
            {
                "model.layers.0.self_attn.q_proj.qweight": (4, 64),
                "model.layers.0.self_attn.q_proj.scales": (2, 64),
                "model.layers.0.self_attn.q_proj.g_idx": (32,),
            },
            id="gptq",
        ),
        pytest.param({"language_model.model.layers.0.self_attn.q_proj.weight": (64, 32)}, id="inside another model"),
    ],
)
def test_a_module_is_found_however_it_is_stored(tensors: Mapping[str, tuple[int, ...]], tmp_path: Path) -> None:
    """And its sizes are compared as far as the headers tell them."""
    module = "model.layers.0.self_attn.q_proj"
    assert check(write_adapter(tmp_path / "fits", {module: (32, 64)}), tensors) == 4
    assert "the model's from 32 to 64" in problems(write_adapter(tmp_path / "wrong", {module: (32, 48)}), tensors)


def test_a_name_that_two_modules_share_is_not_taken_for_either(tmp_path: Path) -> None:
    """As of a model that sees and one that reads."""
    shapes = {f"{tower}.layers.0.fc1.weight": (64, 32) for tower in ("vision.encoder", "text.decoder")}
    directory = write_adapter(tmp_path / "adapter", {"decoder.layers.0.fc1": (32, 64)})
    assert problems(directory, shapes) == "decoder.layers.0.fc1 is no module of the model"
    assert check(write_adapter(tmp_path / "exact", {"text.decoder.layers.0.fc1": (32, 64)}), shapes) == 4


def test_weights_from_inputs_to_outputs_are_compared_the_other_way(tmp_path: Path) -> None:
    """As those of GPT-2, whose adapters say fan_in_fan_out."""
    shapes = {"transformer.h.0.attn.c_attn.weight": (32, 96)}
    modules = {"transformer.h.0.attn.c_attn": (32, 96)}
    assert check(write_adapter(tmp_path / "a", modules, config={"fan_in_fan_out": True}), shapes) == 4
    assert "c_attn" in problems(write_adapter(tmp_path / "b", modules), shapes)


def test_an_embedding_is_from_tokens_to_channels(tmp_path: Path) -> None:
    """Its matrices have names of their own."""
    directory = write_adapter(tmp_path / "adapter", {})
    shapes = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 256),
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 4),
        "base_model.model.model.embed_tokens.base_layer.weight": (256, 64),
    }
    write_safetensors(directory / "adapter_model.safetensors", shapes, "F32")
    assert check(directory, {"model.embed_tokens.weight": (256, 64)}) == 4
    assert "embed_tokens" in problems(directory, {"model.embed_tokens.weight": (512, 64)})


def test_experts_are_left_to_the_engine(tmp_path: Path) -> None:
    """Their tensors are stored in many ways."""
    assert check(write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts.3.w1": (32, 64)})) == 4


def test_ranks_by_module_count_up_to_the_highest(tmp_path: Path) -> None:
    """Of rank_pattern too."""
    module = "model.layers.0.self_attn.q_proj"
    directory = write_adapter(tmp_path / "a", {module: (32, 64)}, rank=8, config={"r": 4, "rank_pattern": {module: 8}})
    assert check(directory, max_rank=8) == 8
    with pytest.raises(FailedPreconditionError) as caught:
        check(directory, max_rank=7)
    assert caught.value.reason == "ADAPTER_RANK_TOO_HIGH"
    assert (caught.value.metadata["rank"], caught.value.metadata["max_lora_rank"]) == ("8", "7")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"base_model.model.q_proj.lora_A.weight": (4, 32)}, "ADAPTER_INCOMPATIBLE"),
        (
            {"base_model.model.q_proj.lora_A.weight": (4,), "base_model.model.q_proj.lora_B.weight": (64, 4)},
            "ADAPTER_INCOMPATIBLE",
        ),
        ({"base_model.model.q_proj.lora_magnitude_vector": (4,)}, "ADAPTER_INVALID"),
        ({}, "ADAPTER_INVALID"),
    ],
)
def test_matrices_that_are_not_two_by_two_are_refused(
    shapes: Mapping[str, tuple[int, ...]], reason: str, tmp_path: Path
) -> None:
    """One alone, a vector, something else, or none at all; the adapter is named by its own URI."""
    directory = write_adapter(tmp_path / "adapter", {})
    write_safetensors(directory / "adapter_model.safetensors", shapes, "F32")
    with pytest.raises(FailedPreconditionError) as caught:
        check(directory)
    assert caught.value.reason == reason
    assert caught.value.metadata["uri"] == URI


def test_many_problems_are_counted(tmp_path: Path) -> None:
    """The first ten are told."""
    modules = {f"model.layers.{layer}.nothing": (32, 64) for layer in range(12)}
    with pytest.raises(FailedPreconditionError, match="and 2 more"):
        check(write_adapter(tmp_path / "adapter", modules))
