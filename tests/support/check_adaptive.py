"""Checks of what ADAPTIVE measures and foretells, on random models of a few thousand weights; run with the
llmcompressor engine's python:

    python check_adaptive.py

Prints the name of each check that passed.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import copy
import dataclasses
import io
import itertools
import json
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from bitmill_engine_kit.calibration import Samples
from bitmill_engine_kit.plan import AS_IT_IS, Plan, fused_groups, plan_layers
from bitmill_engine_kit.protocol import (
    AdaptiveSearch,
    Calibration,
    EngineError,
    EventWriter,
    ModuleRule,
    QuantizeRequest,
    Recipe,
    Treatment,
)
from bitmill_engine_llmcompressor import adaptive, moe, recipes
from bitmill_engine_llmcompressor.adaptive_layerwise import LayerwiseModel, replaced
from bitmill_engine_llmcompressor.adaptive_measure import Measuring
from bitmill_engine_llmcompressor.adaptive_rounding import Rounding
from bitmill_engine_llmcompressor.adaptive_size import layer_bytes, other_bytes
from bitmill_engine_llmcompressor.quantize import compress

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = tempfile.TemporaryDirectory()
LLAMA, QWEN = LlamaConfig(**TINY), Qwen2Config(**TINY)  # the second has biases
ONE = LlamaConfig(**TINY | {"num_hidden_layers": 1})
TWO = LlamaConfig(**TINY | {"num_hidden_layers": 2})
GEMMA = Gemma2Config(**TINY | {"head_dim": 16, "sliding_window": 8})  # soft caps, two kinds of masks
MIXTRAL = MixtralConfig(**TINY | {"num_local_experts": 4})
UNQUANTIZED = Treatment("UNQUANTIZED", "NONE", 0, True)
W4_CHANNEL, W4_64, W4_32 = (Treatment("W4A16", "GPTQ", size, True) for size in (-1, 64, 32))
W4_128, W8 = Treatment("W4A16", "GPTQ", 128, True), Treatment("W8A16", "GPTQ", -1, True)
CANDIDATES = (W4_CHANNEL, W4_128, W4_32, W8, UNQUANTIZED)
# One for each group of layers of three decoder layers.
TWELVE = [
    *(Treatment("W4A16", "RTN", size, symmetric) for size in (-1, 32, 64) for symmetric in (True, False)),
    Treatment("W8A16", "RTN", 32, True),
    *(Treatment(scheme, "RTN", 0, True) for scheme in ("NVFP4A16", "W8A8_INT8", "FP8_DYNAMIC", "FP8_STATIC")),
    Treatment("MXFP4A16", "RTN", 0, True),
]


def check_the_divergence_is_that_of_the_whole_model() -> None:
    """Computed from the changed decoder layer on, for every kind of decoder layer."""
    for config in (LLAMA, QWEN, GEMMA, MIXTRAL):
        model = _model(config)
        ids = [list(sample) for sample in _samples().token_ids]
        with torch.no_grad():
            layerwise = LayerwiseModel(model, ids, 3, kept_bytes=0 if config is QWEN else 1 << 30)
            states = layerwise.inputs()
            for index, layer in enumerate(layerwise.layers):
                assert layerwise.divergences(index, states).mean().item() < 1e-6
                noisy = {
                    name: _noisy(each) for name, each in recipes.linear_layers(model).items() if f"{layer}." in name
                }
                following = layerwise.advance(index, states)
                with replaced(model, noisy):
                    measured = layerwise.divergences(index, states).mean().item()
                    expected = _divergence(_model(config), model, ids[:3])
                    changed = layerwise.advance(index, states)
                    error = layerwise.relative_error(index, states, following)
                assert expected > 1e-4, (config, index, expected)
                assert abs(measured - expected) < 1e-3 * expected, (config, index, measured, expected)
                relative = [
                    ((a - b).square().sum(-1) / b.square().sum(-1)).flatten()
                    for a, b in zip(changed[:3], following[:3], strict=True)
                ]
                assert abs(error / torch.cat(relative).mean().item() - 1) < 1e-4
                states = following
            nll = -_log_probabilities(model, ids[:3])[:, :-1].gather(2, torch.tensor(ids[:3])[:, 1:, None]).mean()
            for perplexity in (layerwise.perplexity(), layerwise.perplexity(states)):
                assert abs(perplexity / nll.exp() - 1) < 1e-5


def check_layers_are_rounded_and_stored_as_foretold() -> None:
    """The rounded copy of a layer has the weights that the artifact's is decompressed to, whatever the scheme, and the
    weight files have the bytes that were said, and at most a few less for each tensor."""
    model, source = _model(LLAMA, torch.bfloat16), _model(LLAMA, torch.bfloat16)
    treatments = dict(zip(fused_groups(recipes.linear_layers(model)), TWELVE, strict=True))
    rules = tuple(ModuleRule(name, treatment) for names, treatment in treatments.items() for name in names)
    _compress_and_check_size(model, _recipe(UNQUANTIZED, rules=rules))
    rounding = Rounding("STATIC", 0.01, torch.bfloat16)
    for names, treatment in treatments.items():
        ours = rounding({name: source.get_submodule(name).float() for name in names}, treatment, {})
        for name in names:
            theirs = model.get_submodule(name)
            decompress_module(theirs)
            assert torch.equal(ours[name].weight, theirs.weight.float()), (treatment, name)


def check_sizes_of_other_models_are_foretold() -> None:
    """With biases, other norms, tied heads, fused layers, experts, several schemes, and scales of a KV cache."""
    tied = LlamaConfig(**TINY | {"tie_word_embeddings": True})
    rules = (ModuleRule("re:.*mlp", Treatment("W8A8_INT8", "RTN", 0, True)),)
    nearest = _recipe(Treatment("W4A16", "RTN", 32, True))
    for config in (GEMMA, Phi3Config(**TINY | {"num_hidden_layers": 1}), tied, MIXTRAL):
        _compress_and_check_size(_model(config, torch.bfloat16), nearest)
    changed = dataclasses.replace(nearest, ignore=("re:.*1.mlp.*",), rules=rules, kv_cache="FP8")
    _compress_and_check_size(_model(QWEN, torch.bfloat16), changed)


def check_gptq_rounds_as_for_the_artifact() -> None:
    """In the first decoder layer, whose attention reads the same in both, all but ties fall alike."""
    for treatment in (W4_32, Treatment("W8A8_INT8", "GPTQ", 0, True)):
        model, source = _model(LLAMA), _model(LLAMA)
        recipe = _recipe(treatment)
        _compress(model, recipe, plan_layers(recipes.shapes(model), recipe))
        names = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
        linears = {name: source.get_submodule(name) for name in names}
        with torch.no_grad():
            layerwise = LayerwiseModel(source, _samples().token_ids, 6, 0)
            statistics, _ = layerwise.record(0, layerwise.inputs(), linears)
        rounding = Rounding("STATIC", 0.01, torch.float32)
        ours = rounding(linears, treatment, statistics)
        nearest = rounding(linears, treatment, {})
        for name in linears:
            theirs = model.get_submodule(name)
            compress_module(theirs)
            decompress_module(theirs)
            assert ((ours[name].weight - theirs.weight).abs() > 1e-6).float().mean() < 0.005, (treatment, name)
            assert not torch.equal(ours[name].weight, nearest[name].weight)


def check_experts_that_no_token_reached_are_rounded_to_nearest() -> None:
    """And the others by what they read."""
    model = moe.linearize(_model(MIXTRAL))
    linears = recipes.linear_layers(model)
    group = next(names for names in fused_groups(linears) if "experts" in names[0])
    with torch.no_grad():
        layerwise = LayerwiseModel(model, [[5, 5, 5, 5]], 1, 0)
        statistics, _ = layerwise.record(0, layerwise.inputs(), {name: linears[name] for name in group})
    assert len(group) == 12
    assert 0 < len(statistics) < 12  # of four experts a token chooses two
    rounding = Rounding("STATIC", 0.01, torch.float32)
    both, nearest = (rounding({n: linears[n] for n in group}, W4_32, known) for known in (statistics, {}))
    for name in group:
        assert both[name].weight.isfinite().all()
        assert torch.equal(both[name].weight, nearest[name].weight) == (name not in statistics), name


def check_the_least_loss_within_a_size_is_chosen() -> None:
    """The artifact keeps the budget and uses it; layers that run as one matrix get one treatment; losses fall."""
    least, most = _size_of(TWO, W4_CHANNEL), _size_of(TWO, UNQUANTIZED)
    losses = []
    for budget in ((4 * least + most) // 5, (least + most) // 2):
        model = _model(TWO, torch.bfloat16)
        plan, rows = _resolve(model, max_size_bytes=budget)
        for names in fused_groups(plan):
            assert len({plan[name].treatment for name in names}) == 1
        chosen = [row for row in rows if row["chosen"]]
        assert [name for row in chosen for name in row["modules"]] == [n for g in fused_groups(plan) for n in g]
        for row in chosen:
            treatment = plan[row["modules"][0]].treatment
            assert (row["scheme"], row["group_size"]) == (treatment.scheme, treatment.group_size)
        losses.append(sum(row["kl_divergence"] for row in chosen))
        _compress(model, _recipe(UNQUANTIZED), plan)
        saved = _saved_bytes(model)
        assert saved <= budget
        # What is left is less than the least step from W4A16 to more.
        assert saved > budget - (most - least) // 6
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 2 * losses[1]


def check_a_candidate_is_offered_only_to_layers_that_it_fits() -> None:
    """128 divides the 128 channels that down_proj reads, and not the 64 of the others."""
    _, rows = _resolve(_model(ONE, torch.bfloat16), max_size_bytes=1 << 30, candidates=(W4_128, W4_32, W8))
    for modules, group in itertools.groupby(rows, key=lambda row: row["modules"]):
        offered = [(row["scheme"], row["group_size"]) for row in group]
        wide = modules[0].endswith("down_proj")
        assert offered == [("W4A16", 128)] * wide + [("W4A16", 32), ("W8A16", -1)], modules


def check_losses_are_those_of_the_model() -> None:
    """Of the candidate that loses most it is measured; what is told of the others is near what they lose."""
    model = _model(TWO, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    request = _request(max_size_bytes=1 << 30)
    groups = dict.fromkeys(fused_groups(recipes.linear_layers(model)), CANDIDATES[:-1])
    with Measuring(model, request, _samples(), 4) as measuring:
        done: list[int] = []
        told = measuring.losses({names: [t for t in ts if t != W4_128] for names, ts in groups.items()}, done.append)
    assert done == list(range(1, len(groups) + 1))
    assert told.keys() == groups.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    source = _model(TWO, torch.bfloat16).float()
    ids = [list(sample) for sample in _samples().token_ids][:4]
    rounding = Rounding("STATIC", 0.01, torch.bfloat16)
    for names, losses in told.items():
        assert losses[W8] < 0.05 * losses[W4_32] < losses[W4_CHANNEL]
        statistics = _statistics(source, names)
        for treatment, loss in losses.items():
            layers = rounding({name: source.get_submodule(name) for name in names}, treatment, statistics)
            changed = copy.deepcopy(source)
            with replaced(changed, layers):
                true = _divergence(source, changed, ids)
            near = 1.01 if loss == max(losses.values()) else 1.5
            assert true / near < loss < true * near, (names, treatment, loss, true)


def check_a_perplexity_budget_is_kept_as_measured() -> None:
    """The smaller the ratio, the larger the artifact; a ratio that no candidate keeps is refused."""
    sizes = []
    for ratio in (1.5, 1.01):
        model = _model(ONE, torch.bfloat16)
        plan, rows = _resolve(model, max_perplexity_ratio=ratio)
        with Measuring(model, _request(max_size_bytes=1), _samples(), 4) as measuring:
            measured = measuring.perplexity_ratio({name: layer.treatment for name, layer in plan.items()})
        assert measured <= ratio
        sizes.append(sum(row["size_bytes"] for row in rows if row["chosen"]))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1]
    error = _refusal(_model(ONE, torch.bfloat16), max_perplexity_ratio=0.9, candidates=(W4_CHANNEL, W8))
    assert error.reason == "BUDGET_TOO_SMALL"
    assert float(error.metadata["least_perplexity_ratio"]) > 0.9


def check_a_size_that_no_choice_keeps_is_refused() -> None:
    """Before anything is measured; the error names the least size, which is granted."""
    error = _refusal(_model(ONE, torch.bfloat16), max_size_bytes=1000)
    assert error.reason == "BUDGET_TOO_SMALL"
    least = int(error.metadata["least_size_bytes"])
    assert str(least) in error.message
    plan, _ = _resolve(_model(ONE, torch.bfloat16), max_size_bytes=least)
    assert {layer.treatment for layer in plan.values()} == {W4_CHANNEL}
    assert _refusal(_model(ONE, torch.bfloat16), max_size_bytes=least - 1).reason == "BUDGET_TOO_SMALL"


def check_a_budget_that_leaves_all_as_it_is_is_refused() -> None:
    """There would be no quantized artifact."""
    assert _refusal(_model(ONE, torch.bfloat16), max_size_bytes=1 << 30).reason == "NOTHING_QUANTIZED"


def check_rules_and_ignore_go_before_the_search() -> None:
    """Layers that they name are neither measured nor changed, and their bytes count."""
    model = _model(TWO, torch.bfloat16)
    rules = (ModuleRule("re:.*down_proj", Treatment("W8A8_INT8", "RTN", 0, True)),)
    budget = _size_of(TWO, UNQUANTIZED) * 9 // 10
    plan, rows = _resolve(model, max_size_bytes=budget, rules=rules, ignore=("re:.*layers.0",))
    assert all(layer.treatment == AS_IT_IS for name, layer in plan.items() if "layers.0" in name)
    assert plan["model.layers.1.mlp.down_proj"].treatment == rules[0].treatment
    assert not [name for row in rows for name in row["modules"] if "layers.0" in name or "down_proj" in name]
    _compress(model, _recipe(UNQUANTIZED), plan)
    assert _saved_bytes(model) <= budget


def _model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose layers matter."""
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
                parameter.mul_(6)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _noisy(layer: torch.nn.Linear) -> torch.nn.Linear:
    noisy = copy.deepcopy(layer)
    noisy.weight.add_(0.2 * torch.randn_like(noisy.weight) * noisy.weight.std())
    return noisy


def _samples() -> Samples:
    generator = torch.Generator().manual_seed(1)
    # Of two lengths, as documents are.
    lengths = (48, 48, 48, 48, 40, 24)
    return Samples(tuple(array("I", torch.randint(3, 256, (each,), generator=generator).tolist()) for each in lengths))


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


def _request(
    max_size_bytes: int | None = None,
    max_perplexity_ratio: float | None = None,
    candidates: tuple[Treatment, ...] = CANDIDATES,
    **changes: Any,
) -> QuantizeRequest:
    search = AdaptiveSearch(candidates, max_size_bytes, max_perplexity_ratio, 4)
    recipe = _recipe(Treatment("ADAPTIVE", "NONE", 0, True), adaptive=search, **changes)
    return QuantizeRequest(Path("source"), Path("model"), recipe, Calibration(None, 6, 48))


def _resolve(model: PreTrainedModel, **changes: Any) -> tuple[Plan, list[dict[str, Any]]]:
    request, events = _request(**changes), io.StringIO()
    plan = plan_layers(recipes.shapes(model), request.recipe)
    resolved, rows = adaptive.resolve(plan, model, request, _samples(), EventWriter(events))
    told = [json.loads(line) for line in events.getvalue().splitlines()]
    assert told[0]["completed"] == 0
    assert {event["unit"] for event in told} <= {"measurements", "verifications"}
    assert all(event["completed"] <= event["total"] for event in told)
    return resolved, rows


def _refusal(model: PreTrainedModel, **changes: Any) -> EngineError:
    try:
        _resolve(model, **changes)
    except EngineError as error:
        return error
    raise AssertionError("it was not refused")


def _compress(model: PreTrainedModel, recipe: Recipe, plan: Plan) -> None:
    calibrated = any(layer.treatment.algorithm == "GPTQ" for layer in plan.values())
    used = _samples() if calibrated or recipes.needs_calibration(recipe) else None
    if calibrated:
        recipe = dataclasses.replace(recipe, treatment=W4_32)  # so that data is taken to be needed
    compress(model, object(), used, plan, recipe, lambda *_: None)


def _statistics(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Any]:
    with torch.no_grad():
        layerwise = LayerwiseModel(model, _samples().token_ids, 4, 0)
        states = layerwise.inputs()
        for index, layer in enumerate(layerwise.layers):
            inside = {name: model.get_submodule(name) for name in names if name.startswith(f"{layer}.")}
            statistics, states = layerwise.record(index, states, inside)
            if inside:
                return statistics
    raise AssertionError(names)


def _log_probabilities(model: PreTrainedModel, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(ids)).logits.double(), dim=-1)


def _divergence(source: PreTrainedModel, model: PreTrainedModel, ids: list[list[int]]) -> float:
    """Mean over all tokens of samples of any length."""
    total, tokens = 0.0, 0
    for sample in ids:
        expected, changed = _log_probabilities(source, [sample]), _log_probabilities(model, [sample])
        total += (expected.exp() * (expected - changed)).sum().item()
        tokens += len(sample)
    return total / tokens


def _saved_bytes(model: PreTrainedModel) -> int:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


def _size_of(config: PreTrainedConfig, treatment: Treatment) -> int:
    """What is foretold for a model with every layer treated so."""
    model = _model(config, torch.bfloat16)
    recipe = _recipe(treatment)
    return _foretold(model, plan_layers(recipes.shapes(model), recipe), recipe)


def _foretold(model: PreTrainedModel, plan: Plan, recipe: Recipe) -> int:
    layers = recipes.linear_layers(model)
    return other_bytes(model, plan, recipe) + sum(
        layer_bytes(name, layers[name], layer.treatment) for name, layer in plan.items()
    )


def _compress_and_check_size(model: PreTrainedModel, recipe: Recipe) -> None:
    """Leaves the model compressed."""
    model = moe.linearize(model)
    plan = plan_layers(recipes.shapes(model), recipe)
    foretold = _foretold(model, plan, recipe)
    _compress(model, recipe, plan)
    saved, tensors = _saved_bytes(model), len(model.state_dict())
    assert saved <= foretold <= saved + 64 + 16 * tensors, (type(model).__name__, recipe, foretold, saved)


def main() -> None:
    checks: list[Callable[[], None]] = [value for name, value in globals().items() if name.startswith("check_")]
    for check in checks:
        check()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
