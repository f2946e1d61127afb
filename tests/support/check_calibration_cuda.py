"""Checks what of the CUDA path needs no GPU; run with the llmcompressor engine's python. Prints one line a check."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from bitmill_engine_llmcompressor import calibration_cuda

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GIB = 2**30


def check_attention() -> None:
    """Fused attention gives what eager attention gives: causal, with a sliding window, and with capped scores."""
    torch.manual_seed(0)
    configs = (
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=16, sliding_window=5)),
    )
    for model_type, config in configs:
        model = model_type(config).eval()
        model.set_attn_implementation("eager")
        inputs = torch.randint(0, 100, (3, 20))
        with torch.no_grad():
            eager = model(inputs).logits
            with calibration_cuda.fused_attention(model):
                fused = model(inputs).logits
            after = model(inputs).logits
        assert torch.allclose(eager, fused, atol=1e-5), (model_type, (eager - fused).abs().max())
        assert torch.equal(eager, after), "the eager attention is back"


def check_mirror() -> None:
    """A symmetric matrix comes back from its lower part, whatever lies above the diagonal."""
    torch.manual_seed(0)
    rows = torch.randn(50, 16)
    whole = rows.T @ rows
    lower = whole.tril() + torch.randn(16, 16).triu(1)
    calibration_cuda.mirror_lower(lower)
    assert torch.equal(lower, whole.tril() + whole.tril(-1).T)


def check_plan() -> None:
    """The plan of an 8B Llama: all on an H200, small batches on little memory, activations on the host at last."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336)
    plans = [calibration_cuda.plan_batches(config, 512, 2048, free * GIB) for free in (138, 44, 24, 2)]
    assert plans[0].batch_size == calibration_cuda.MAX_BATCH_SIZE
    assert [plan.offload_device for plan in plans] == ["cuda", "cuda", "cpu", "cpu"], plans
    assert plans[-1].batch_size < plans[0].batch_size, plans
    assert calibration_cuda.plan_batches(config, 4, 2048, 138 * GIB).batch_size == 4


for check in (check_attention, check_mirror, check_plan):
    check()
    print(check.__name__)
