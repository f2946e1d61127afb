"""The rows of `modules` in the result: what became of each layer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bitmill_engine_kit.plan import LayerPlan, Plan


@dataclass(frozen=True)
class Outcome:
    """What rounding a layer by GPTQ came to."""

    loss: float | None = None
    dampening_frac: float | None = None
    """Set where more than asked for was needed."""
    remark: str = ""


def module_rows(
    plan: Plan, outcomes: Mapping[str, Outcome], row_name: Callable[[str], str]
) -> list[dict[str, str | int | float | None]]:
    """One row for each name that `row_name` gives the layers, in their order; experts share one.

    A row of several has their mean loss and their highest damping, and says how many a remark is about.
    """
    members: dict[str, list[str]] = {}
    for name in plan:
        members.setdefault(row_name(name), []).append(name)
    return [
        _row(row, [plan[name] for name in names], [outcomes.get(name, Outcome()) for name in names])
        for row, names in members.items()
    ]


def _row(name: str, layers: list[LayerPlan], outcomes: list[Outcome]) -> dict[str, Any]:
    losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
    dampings = [outcome.dampening_frac for outcome in outcomes if outcome.dampening_frac is not None]
    remarks = [layer.remark or outcome.remark for layer, outcome in zip(layers, outcomes, strict=True)]
    return {
        "name": name,
        "scheme": layers[0].treatment.scheme,
        "group_size": layers[0].treatment.group_size,
        "loss": sum(losses) / len(losses) if losses else None,
        "dampening_frac": max(dampings, default=None),
        "remark": _remark(remarks),
    }


def _remark(remarks: Iterable[str]) -> str:
    given = list(remarks)
    if len(given) == 1:
        return given[0]
    counts = {remark: given.count(remark) for remark in given if remark}
    return "; ".join(f"{count} of {len(given)}: {remark}" for remark, count in counts.items())
