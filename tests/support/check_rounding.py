"""Checks of how the llmcompressor engine rounds, on random models of a few thousand weights; run with its python:

    python check_rounding.py

Prints the name of each check that passed.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import copy
import dataclasses
import tempfile
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import disable_quantization
from llmcompressor.modifiers.gptq.helpers import factorize_hessian
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from bitmill_engine_kit.calibration import Samples
from bitmill_engine_kit.plan import plan_layers
from bitmill_engine_kit.protocol import EngineError, Recipe, Treatment
from bitmill_engine_llmcompressor import damping, moe, recipes, smoothing
from bitmill_engine_llmcompressor.gptq import MORE_DAMPING, NOT_INVERTED, PlanModifier
from bitmill_engine_llmcompressor.quantize import compress
from bitmill_engine_llmcompressor.rows import Outcome

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = tempfile.TemporaryDirectory()
W8A8 = Treatment("W8A8_INT8", "RTN", 0, True)
W4A16 = Treatment("W4A16", "GPTQ", 32, True)
AWQ = Treatment("W4A16", "AWQ", 32, True)


def check_factorize_is_llmcompressors_where_it_works() -> None:
    """Bit for bit, for few Hessians and for so many that they go together."""
    for batch in (1, 3, 20):
        inputs = torch.randn(batch, 200, 48, generator=torch.Generator().manual_seed(batch))
        hessians = inputs.mT @ inputs
        hessians[0, 5, :] = hessians[0, :, 5] = 0
        weights = torch.randn(batch, 8, 48, generator=torch.Generator().manual_seed(0))
        theirs, ours = hessians.clone(), hessians.clone()
        their_weights, our_weights = weights.clone(), weights.clone()
        fallback = torch.zeros(batch, dtype=torch.bool)
        factorize_hessian(their_weights, theirs, 0.01, fallback)
        damping.quiet_dead_channels(our_weights, ours)
        assert damping.factorize(ours, 0.01) == [0.01] * batch
        assert torch.equal(ours, theirs)
        assert torch.equal(our_weights, their_weights)
        assert not fallback.any()


def check_factorize_damps_more_where_it_must() -> None:
    """A Hessian with a small negative eigenvalue needs more; one that is negative throughout never inverts."""
    for batch in (3, 20):
        hessians = torch.eye(8).repeat(batch, 1, 1)
        hessians[1, 0, 0] = -0.05
        hessians[2] = -torch.eye(8)
        needed = damping.factorize(hessians, 0.01)
        assert needed[1] == 0.01 * 10
        assert needed[2] is None
        assert torch.equal(hessians[2], torch.eye(8))
        assert needed[:1] + needed[3:] == [0.01] * (batch - 2)
        assert hessians.isfinite().all()


def check_smoothing_changes_nothing_but_the_rounding() -> None:
    """With the rounding off, a smoothed model says what it said before, for every architecture that is smoothed."""
    for config in _configs():
        for treatment, strength in ((W8A8, 0.8), (AWQ, 0.0)):
            model = _model(config)
            before = _logits(model)
            recipe = _recipe(treatment, smoothing_strength=strength)
            _compress(model, recipe)
            changed = [
                name
                for name, weight in _model(config).named_parameters()
                if not torch.equal(weight, dict(model.named_parameters())[name])
            ]
            assert changed, (type(model).__name__, treatment)
            model.apply(disable_quantization)
            error = (_logits(model) - before).abs().max() / before.abs().max()
            assert error < 1e-4, (type(model).__name__, treatment, error)


def check_a_model_of_which_it_is_not_known_what_reads_what_is_not_smoothed() -> None:
    """StableLM's norms feed the MLP, too, where its residuals are parallel."""
    for treatment, strength in ((W8A8, 0.8), (AWQ, 0.0)):
        model = _model(StableLmConfig(**TINY, use_parallel_residual=True))
        error = _error(model, _recipe(treatment, smoothing_strength=strength))
        assert error is not None, treatment
        assert error.reason == "UNSUPPORTED_RECIPE", error
        assert error.metadata == {"architecture": "StableLmForCausalLM"}


def check_hessians_are_those_of_smoothed_inputs() -> None:
    """What GPTQ rounds by after SmoothQuant is what it would have seen had it run the smoothed model."""
    kept: dict[str, torch.Tensor] = {}
    original = PlanModifier.compress_module_list

    def keep(modifier: PlanModifier, modules: list[torch.nn.Module]) -> None:
        for module in modules:
            name = modifier._gptq[module]
            kept[name] = modifier._hessians[module] / modifier._num_samples[module]
        original(modifier, modules)

    gptq = dataclasses.replace(W8A8, algorithm="GPTQ")
    with patch.object(PlanModifier, "compress_module_list", keep):
        _compress(_model(LlamaConfig(**TINY)), _recipe(gptq, smoothing_strength=0.8))
    smoothed = _model(LlamaConfig(**TINY))
    _compress(smoothed, _recipe(W8A8, smoothing_strength=0.8))
    smoothed.apply(disable_quantization)
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"):
        name = f"model.layers.0.{leaf}"
        if leaf.startswith("mlp"):
            continue  # its input has the rounding of the attention in it
        seen = _inputs(smoothed, name)
        expected = 2 * seen.T @ seen / len(_samples().token_ids)
        assert torch.allclose(kept[name], expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()), name


def check_damping_is_recorded() -> None:
    """Of one short sample no Hessian has full rank; with next to no damping some invert only with more."""
    model = _model(LlamaConfig(**TINY))
    outcomes = _compress(model, _recipe(W4A16, dampening_frac=1e-9), Samples((array("I", range(16)),)))
    assert len(outcomes) == 14
    more = {outcome.dampening_frac for outcome in outcomes.values() if outcome.remark == MORE_DAMPING}
    assert all(outcome.loss is not None for outcome in outcomes.values())
    assert more or any(outcome.remark == NOT_INVERTED for outcome in outcomes.values())
    assert all(fraction in (1e-8, 1e-7, 1e-6) or abs(fraction / 1e-8 % 10) < 11 for fraction in more)


def check_layers_that_never_invert_are_rounded_to_nearest() -> None:
    """As round to nearest alone does it, and said so."""
    model = _model(LlamaConfig(**TINY))
    with patch.object(damping, "_invert", lambda matrices: torch.zeros(matrices.shape[:-2], dtype=torch.bool)):
        outcomes = _compress(model, _recipe(W4A16))
    assert {outcome.remark for outcome in outcomes.values()} == {NOT_INVERTED}
    nearest = _model(LlamaConfig(**TINY))
    _compress(nearest, _recipe(dataclasses.replace(W4A16, algorithm="RTN")))
    for name, layer in recipes.linear_layers(nearest).items():
        scale = layer.weight_scale.repeat_interleave(32, dim=1)
        rounded = torch.clamp(torch.round(layer.weight / scale), -8, 7) * scale
        assert torch.allclose(model.get_submodule(name).weight, rounded, atol=1e-6), name


def check_activations_that_are_not_numbers_end_it() -> None:
    """Whatever looks at them first; the tensor is named."""
    for treatment, strength in ((W4A16, 0.0), (AWQ, 0.0), (W8A8, 0.8)):
        model = _model(LlamaConfig(**TINY))
        with torch.no_grad():
            model.model.layers[1].input_layernorm.weight.fill_(float("inf"))
        error = _error(model, _recipe(treatment, smoothing_strength=strength))
        assert error is not None, treatment
        assert error.reason == "NON_FINITE_ACTIVATIONS", error
        assert error.metadata["tensor"].startswith("model.layers.1."), error.metadata


def check_dead_channels_and_empty_rows_stay_sound() -> None:
    """Channels that are never active and rows without a weight give finite weights and scales, whatever the scheme."""
    for scheme, algorithms in recipes.ALGORITHMS.items():
        for algorithm in algorithms:
            if algorithm == "NONE":
                continue
            for symmetric in (True, False) if scheme == "W4A16" else (True,):
                group_size = {"W4A16": 32, "W8A16": 32}.get(scheme, 0)
                model = _model(LlamaConfig(**TINY | {"hidden_size": 128, "intermediate_size": 128})).to(torch.bfloat16)
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.input_layernorm.weight[3] = 0
                        layer.self_attn.q_proj.weight[5] = 0
                        layer.mlp.down_proj.weight.zero_()
                _compress(model, _recipe(Treatment(scheme, algorithm, group_size, symmetric)))
                for name, tensor in model.state_dict().items():
                    numbers = tensor.float()
                    assert numbers.isfinite().all(), (scheme, algorithm, name)
                    assert not name.endswith("_scale") or (numbers > 0).all(), (scheme, algorithm, name)
                assert _logits(model).isfinite().all(), (scheme, algorithm)


def check_norms_of_one_plus_their_weight_keep_their_weight() -> None:
    """Gemma's norms are not touched by a recipe that does not smooth."""
    model = _model(Gemma2Config(**TINY, head_dim=16)).to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters() if "norm" in name}
    _compress(model, _recipe(W4A16))
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def _configs() -> Iterator[PreTrainedConfig]:
    one, head = TINY | {"num_hidden_layers": 1}, {"head_dim": 16}
    yield LlamaConfig(**one)
    yield LlamaConfig(**one | {"num_key_value_heads": 4})
    yield Qwen2Config(**one)
    yield Qwen3Config(**one, **head)
    yield Phi3Config(**one)
    yield Phi3Config(**one | {"num_key_value_heads": 4})
    yield CohereConfig(**one)
    yield Cohere2Config(**one, **head)
    yield Gemma2Config(**one, **head)
    yield Gemma3TextConfig(**one, **head)
    yield GemmaConfig(**one, **head)
    yield Glm4Config(**one, **head)
    yield StableLmConfig(**one)
    yield Qwen3MoeConfig(**one, **head, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model in float32 whose norms and biases do something."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # llm-compressor reads the config of where a model came from.
    config.save_pretrained(CONFIGS.name)
    model.config.name_or_path = CONFIGS.name
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif "embed" not in name:
                parameter.mul_(4)
    return moe.linearize(model)


def _samples() -> Samples:
    generator = torch.Generator().manual_seed(1)
    return Samples(tuple(array("I", torch.randint(3, 256, (32,), generator=generator).tolist()) for _ in range(2)))


def _recipe(treatment: Treatment, **changes: Any) -> Recipe:
    plain = Recipe(
        treatment=treatment,
        ignore=("lm_head",),
        rules=(),
        activation_order="STATIC",
        kv_cache=None,
        smoothing_strength=0,
        dampening_frac=0.01,
        seed=0,
        adaptive=None,
    )
    return dataclasses.replace(plain, **changes)


def _compress(model: PreTrainedModel, recipe: Recipe, samples: Samples | None = None) -> dict[str, Outcome]:
    used = (samples or _samples()) if recipes.needs_calibration(recipe) else None
    plan = plan_layers(recipes.shapes(model), recipe)
    return dict(compress(model, object(), used, plan, recipe, lambda *_: None))


def _error(model: PreTrainedModel, recipe: Recipe) -> EngineError | None:
    """The engine's refusal, if it refuses."""
    try:
        _compress(model, recipe)
    except EngineError as error:
        return error
    return None


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(_samples().token_ids[0])])).logits.float()
    return logits


def _inputs(model: PreTrainedModel, name: str) -> torch.Tensor:
    """All inputs of a layer, (tokens, channels)."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode():
        for sample in _samples().token_ids:
            model(torch.tensor([list(sample)]))
    hook.remove()
    return torch.cat([each.flatten(0, 1) for each in seen])


def main() -> None:
    checks: list[Callable[[], None]] = [value for name, value in globals().items() if name.startswith("check_")]
    # A search of 4 steps instead of 20: what it finds is not looked at here.
    with patch.object(smoothing, "AWQ", partial(smoothing.AWQ, n_grid=4)):
        for check in checks:
            check()
            print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
