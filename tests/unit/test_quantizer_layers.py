"""The layers of a checkpoint are found by their tensors' names, whatever its files call them."""

from __future__ import annotations

import pytest

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.safetensors import TensorInfo
from bitmill_quantizer.plans.layers import (
    fused_matrix,
    has_experts,
    linear_layers,
    missing_decoder_layers,
    non_float_tensors,
    row_name,
)

MLP = "model.layers.0.mlp"


def checkpoint(architecture: str, **tensors: tuple[int, ...]) -> Checkpoint:
    """A checkpoint with tensors of these shapes, a double underscore for each dot of their names."""
    infos = {name.replace("__", "."): TensorInfo("BF16", shape, "x") for name, shape in tensors.items()}
    return Checkpoint({}, architecture, infos, (), 0, 0, None)


def test_layers_of_a_mixture_are_those_of_each_expert() -> None:
    """Its router, and the gate of its shared expert, are none."""
    found = checkpoint(
        "Qwen2MoeForCausalLM",
        model__layers__0__mlp__experts__0__gate_proj__weight=(96, 64),
        model__layers__0__mlp__experts__10__down_proj__weight=(64, 96),
        model__layers__0__mlp__gate__weight=(16, 64),
        model__layers__0__mlp__shared_expert_gate__weight=(1, 64),
        model__layers__0__mlp__shared_expert__up_proj__weight=(128, 64),
        model__layers__0__input_layernorm__weight=(64,),
        model__embed_tokens__weight=(1000, 64),
        lm_head__weight=(1000, 64),
    )
    assert linear_layers(found) == {
        f"{MLP}.experts.0.gate_proj": (96, 64),
        f"{MLP}.experts.10.down_proj": (64, 96),
        f"{MLP}.shared_expert.up_proj": (128, 64),
    }


def test_mixtral_has_transformers_names() -> None:
    """Its files have the names of its first release."""
    found = checkpoint(
        "MixtralForCausalLM",
        model__layers__0__block_sparse_moe__experts__3__w1__weight=(96, 64),
        model__layers__0__block_sparse_moe__experts__3__w2__weight=(64, 96),
        model__layers__0__block_sparse_moe__experts__3__w3__weight=(96, 64),
        model__layers__0__block_sparse_moe__gate__weight=(8, 64),
    )
    assert linear_layers(found) == {
        f"{MLP}.experts.3.gate_proj": (96, 64),
        f"{MLP}.experts.3.down_proj": (64, 96),
        f"{MLP}.experts.3.up_proj": (96, 64),
    }


def test_stacked_experts_are_taken_apart() -> None:
    """As transformers 5 holds them: gate above up, one expert after the other."""
    found = checkpoint(
        "Qwen3MoeForCausalLM",
        model__layers__0__mlp__experts__gate_up_proj=(2, 192, 64),
        model__layers__0__mlp__experts__down_proj=(2, 64, 96),
    )
    assert linear_layers(found) == {
        f"{MLP}.experts.{expert}.{leaf}": shape
        for expert in range(2)
        for leaf, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96)))
    }


def test_an_absurd_number_of_experts_is_not_counted_through() -> None:
    found = checkpoint("Qwen3MoeForCausalLM", model__layers__0__mlp__experts__down_proj=(2**40, 0, 96))
    assert linear_layers(found) == {}


def test_absurd_numbers_of_experts_in_many_layers_are_not_counted_through() -> None:
    """Each is as many as a model could have; a header of 10 kB would fill the memory."""
    shapes = {f"model__layers__{layer}__mlp__experts__down_proj": (4096, 0, 96) for layer in range(100)}
    assert len(linear_layers(checkpoint("Qwen3MoeForCausalLM", **shapes))) == 1 << 18


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj"),
        (f"{MLP}.up_proj", f"{MLP}.gate_up_proj"),
        (f"{MLP}.gate_up_proj", f"{MLP}.gate_up_proj"),
        (f"{MLP}.experts.3.down_proj", f"{MLP}.experts"),
        (f"{MLP}.experts.0.gate_proj", f"{MLP}.experts"),
        (f"{MLP}.shared_expert.gate_proj", f"{MLP}.shared_expert.gate_up_proj"),
    ],
)
def test_what_is_run_as_one_matrix(name: str, matrix: str) -> None:
    assert fused_matrix(name) == matrix


def test_experts_share_a_row() -> None:
    assert row_name(f"{MLP}.experts.12.down_proj") == f"{MLP}.experts.*.down_proj"
    assert row_name(f"{MLP}.down_proj") == f"{MLP}.down_proj"
    assert has_experts([f"{MLP}.down_proj", f"{MLP}.experts.12.down_proj"])
    assert has_experts([row_name(f"{MLP}.experts.12.down_proj")])
    assert not has_experts([f"{MLP}.down_proj", f"{MLP}.shared_expert.down_proj"])


@pytest.mark.parametrize(("count", "missing"), [(2, []), (4, [2, 3]), (None, []), (10**30, []), (True, [])])
def test_decoder_layers_that_config_counts(count: object, missing: list[int]) -> None:
    found = checkpoint(
        "LlamaForCausalLM",
        model__layers__0__mlp__up_proj__weight=(128, 64),
        model__layers__1__mlp__up_proj__weight=(128, 64),
    )
    found.config["num_hidden_layers"] = count
    assert missing_decoder_layers(found) == missing


def test_tensors_that_are_quantized_already() -> None:
    found = checkpoint("LlamaForCausalLM", a=(2,), b=(2,))
    assert non_float_tensors(found) == []
    found.tensors["b"] = TensorInfo("F8_E4M3", (2,), "x")
    assert non_float_tensors(found) == ["b"]
