"""The scheme ADAPTIVE: what each group of layers takes and loses by each candidate, measured, and the choice.

A group is what vLLM runs as one matrix. Its loss is the mean KL divergence of the whole model when only the group is
rounded; losses of groups are taken to add up, which holds while they are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from bitmill_engine_kit.calibration import Samples
from bitmill_engine_kit.plan import AS_IT_IS, LayerPlan, Plan, Shapes, fused_groups, is_fit, skip_unfit
from bitmill_engine_kit.protocol import (
    ADAPTIVE,
    UNQUANTIZED,
    EngineError,
    EventWriter,
    QuantizeRequest,
    Treatment,
)
from bitmill_engine_llmcompressor import moe
from bitmill_engine_llmcompressor.adaptive_choice import (
    Choice,
    Option,
    cheapest,
    cheapest_that_holds,
    lightest,
    total_weight,
)
from bitmill_engine_llmcompressor.adaptive_measure import Measuring
from bitmill_engine_llmcompressor.adaptive_size import layer_bytes, other_bytes
from bitmill_engine_llmcompressor.recipes import linear_layers, shapes

MAX_VERIFICATIONS = 8
"""Whole models that are rounded and measured to keep a perplexity budget."""


@dataclass(frozen=True)
class Group:
    """Layers that get one treatment, and the candidates that fit all of them."""

    names: tuple[str, ...]
    candidates: tuple[Treatment, ...]
    sizes: tuple[int, ...]
    """Bytes in the artifact's weight files, by candidate."""
    losses: dict[Treatment, float] = field(default_factory=lambda: {AS_IT_IS: 0.0})
    """Mean KL divergence in nats of the whole model when only this group is rounded so, as it is measured."""

    def options(self) -> list[Option]:
        """Sizes to be limited, losses to be made small."""
        return [Option(self.losses[each], size) for each, size in zip(self.candidates, self.sizes, strict=True)]

    def options_by_loss(self) -> list[Option]:
        """The other way round."""
        return [Option(option.weight, option.cost) for option in self.options()]


def resolve(
    plan: Plan, model: PreTrainedModel, request: QuantizeRequest, samples: Samples, events: EventWriter
) -> tuple[Plan, list[dict[str, Any]]]:
    """Replace the treatment ADAPTIVE in a plan by what is chosen; also returns the rows of `sensitivities`.

    Afterwards the model is as it was. Raises EngineError BUDGET_TOO_SMALL, naming the least that is possible,
    NOTHING_QUANTIZED for a budget that leaves every layer as it is, UNSUPPORTED_RECIPE and NON_FINITE_ACTIVATIONS.
    """
    search = request.recipe.adaptive
    if search is None:
        raise ValueError("the recipe has no search")
    groups = find_groups(plan, model, search.candidates)
    fixed = _fixed_bytes(plan, model, request)
    if search.max_size_bytes is not None:
        _require_room(groups, fixed, search.max_size_bytes)
    with Measuring(model, request, samples, search.num_samples) as measuring:
        _measure(groups, measuring, events)
        choice = (
            _within_perplexity(groups, measuring, search.max_perplexity_ratio or 1.0, events)
            if search.max_size_bytes is None
            else cheapest([group.options() for group in groups], search.max_size_bytes - fixed)
        )
    chosen = _plan(plan, groups, choice or ())
    if all(layer.treatment == AS_IT_IS for layer in chosen.values()):
        raise EngineError("NOTHING_QUANTIZED", "the budget leaves every layer as it is in the source")
    return chosen, [row for group, index in zip(groups, choice or (), strict=True) for row in _rows(group, index)]


def find_groups(plan: Plan, model: PreTrainedModel, candidates: Sequence[Treatment]) -> list[Group]:
    """The groups that the plan leaves to ADAPTIVE and that some candidate fits."""
    sizes, layers = shapes(model), linear_layers(model)
    groups = []
    for names in fused_groups(name for name, layer in plan.items() if layer.treatment.scheme == ADAPTIVE):
        fitting = tuple(treatment for treatment in map(_as_planned, candidates) if _fits(treatment, names, sizes))
        if fitting:
            taken = (sum(layer_bytes(name, layers[name], treatment) for name in names) for treatment in fitting)
            groups.append(Group(names, fitting, tuple(taken)))
    return groups


def _as_planned(candidate: Treatment) -> Treatment:
    if candidate.algorithm == "AWQ":
        raise EngineError("UNSUPPORTED_RECIPE", "AWQ scales what is before a layer, so no layer can be measured alone")
    return AS_IT_IS if candidate.scheme == UNQUANTIZED else candidate


def _fits(treatment: Treatment, names: Sequence[str], sizes: Shapes) -> bool:
    if not all(is_fit(treatment, sizes[name]) for name in names):
        return False
    together = {name: LayerPlan(treatment) for name in names}
    return skip_unfit(together, {name: sizes[name] for name in names}) == together


def _fixed_bytes(plan: Plan, model: PreTrainedModel, request: QuantizeRequest) -> int:
    """What the weight files hold whatever is chosen."""
    layers = linear_layers(model)
    given = {name: each.treatment for name, each in plan.items() if each.treatment.scheme != ADAPTIVE}
    taken = sum(layer_bytes(name, layers[name], treatment) for name, treatment in given.items())
    return taken + other_bytes(model, plan, request.recipe)


def _require_room(groups: Sequence[Group], fixed: int, max_size_bytes: int) -> None:
    options = [[Option(0.0, size) for size in group.sizes] for group in groups]
    least = fixed + int(total_weight(options, lightest(options)))
    if least > max_size_bytes:
        raise EngineError(
            "BUDGET_TOO_SMALL",
            f"the weights take {least} bytes with the smallest candidates; at most {max_size_bytes} are asked for",
            least_size_bytes=least,
            max_size_bytes=max_size_bytes,
        )


def _measure(groups: Sequence[Group], measuring: Measuring, events: EventWriter) -> None:
    """Fill in the groups' losses."""

    def progress(done: int) -> None:
        events.progress("quantize", done, len(groups), "measurements")

    progress(0)
    losses = measuring.losses({group.names: group.candidates for group in groups}, progress)
    for group in groups:
        group.losses.update(losses[group.names])
        if not all(map(math.isfinite, group.losses.values())):
            message = f"the model's output is not a finite number when {group.names[0]} is rounded"
            raise EngineError("NON_FINITE_ACTIVATIONS", message, tensor=group.names[0])


def _within_perplexity(groups: Sequence[Group], measuring: Measuring, max_ratio: float, events: EventWriter) -> Choice:
    """The least size found whose perplexity, measured on the model with every layer rounded, keeps the budget.

    The losses only say where to begin: on text that the source itself had written, a model's loss of log-likelihood
    would be its divergence.
    """
    ratios: list[float] = []

    def holds(choice: Choice) -> bool:
        chosen = (
            (name, group.candidates[index]) for group, index in zip(groups, choice, strict=True) for name in group.names
        )
        ratios.append(measuring.perplexity_ratio(dict(chosen)))
        events.progress("quantize", len(ratios), MAX_VERIFICATIONS + 1, "verifications")
        return ratios[-1] <= max_ratio

    guess = math.log(max(max_ratio, 1.0))
    choice = cheapest_that_holds([group.options_by_loss() for group in groups], guess, holds, MAX_VERIFICATIONS)
    if choice is None:
        raise EngineError(
            "BUDGET_TOO_SMALL",
            f"the least perplexity found is {min(ratios):.6g} times the source's; at most {max_ratio:g} is asked for",
            least_perplexity_ratio=min(ratios),
            max_perplexity_ratio=max_ratio,
        )
    return choice


def _plan(plan: Plan, groups: Sequence[Group], choice: Choice) -> Plan:
    chosen = {
        name: LayerPlan(group.candidates[index])
        for group, index in zip(groups, choice, strict=True)
        for name in group.names
    }
    unfit = LayerPlan(AS_IT_IS, "no candidate fits its size, or that of a layer that it runs as one matrix with")
    return {
        name: chosen.get(name, unfit) if layer.treatment.scheme == ADAPTIVE else layer for name, layer in plan.items()
    }


def _rows(group: Group, chosen: int) -> Iterator[dict[str, Any]]:
    """The rows of `sensitivities`, one for each candidate."""
    modules = list(dict.fromkeys(map(moe.row_name, group.names)))
    for index, (treatment, size) in enumerate(zip(group.candidates, group.sizes, strict=True)):
        yield {
            "modules": modules,
            "scheme": treatment.scheme,
            "group_size": treatment.group_size,
            "kl_divergence": group.losses[treatment],
            "size_bytes": size,
            "chosen": index == chosen,
        }
