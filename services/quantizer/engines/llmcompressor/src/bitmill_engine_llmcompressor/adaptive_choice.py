"""One option for each group under one limit: the multiple-choice knapsack problem. Pure; imports nothing.

ADAPTIVE asks it both ways: the least loss within a size, and the least size within a loss. The method is Lagrangian
relaxation for a plan and a bound, then dynamic programming over what the bound leaves open (H. Kellerer, U. Pferschy,
D. Pisinger, Knapsack Problems, 2004, chapter 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_STATES = 1000
"""Partial plans that are carried from group to group. While no more come up, the plan is the best there is; beyond it
those of the best bound go on."""
# Each halves the multiplier's interval; a double has 53 bits.
_HALVINGS = 100
# Sums in another order differ by rounding: a bound prunes only what is worse by more than this.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Option:
    """What one choice for a group adds to the objective and to what is limited; neither is negative."""

    cost: float
    weight: float


Groups = Sequence[Sequence[Option]]
Plan = tuple[int, ...]
"""For each group the index of its option."""


@dataclass(frozen=True)
class _State:
    """A choice for the first groups: the last of them by its index, the others by the state that it goes on from."""

    weight: float
    cost: float
    option: int = -1
    parent: _State | None = None


def total_cost(groups: Groups, plan: Plan) -> float:
    """The sum of the chosen options' costs."""
    return sum(options[index].cost for options, index in zip(groups, plan, strict=True))


def total_weight(groups: Groups, plan: Plan) -> float:
    """The sum of the chosen options' weights, added in the groups' order."""
    return sum(options[index].weight for options, index in zip(groups, plan, strict=True))


def lightest(groups: Groups) -> Plan:
    """The plan of the least weight; of several, the cheapest."""
    return tuple(min(range(len(options)), key=lambda i: (options[i].weight, options[i].cost)) for options in groups)


def cheapest(groups: Groups, limit: float) -> Plan | None:
    """The plan of the least cost whose weight is not above `limit`; None when the lightest one's is."""
    if total_weight(groups, lightest(groups)) > limit:
        return None
    multiplier = _multiplier(groups, limit)
    plan = _fill(groups, _relaxed(groups, multiplier), limit)
    return _search(groups, limit, multiplier, plan) or plan


def _relaxed(groups: Groups, multiplier: float) -> Plan:
    """The least of cost + multiplier * weight in each group; of several, the lightest."""
    return tuple(
        min(range(len(options)), key=lambda i: (options[i].cost + multiplier * options[i].weight, options[i].weight))
        for options in groups
    )


def _multiplier(groups: Groups, limit: float) -> float:
    """The least price of weight, but for a small rest, at which the relaxed plan keeps the limit."""
    if total_weight(groups, _relaxed(groups, 0)) <= limit:
        return 0.0
    low, high = 0.0, 1.0
    while total_weight(groups, _relaxed(groups, high)) > limit:
        low, high = high, high * 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if total_weight(groups, _relaxed(groups, middle)) > limit:
            low = middle
        else:
            high = middle
    return high


def _fill(groups: Groups, plan: Plan, limit: float) -> Plan:
    """Spend what the limit still allows on the changes that save the most cost for their weight."""
    chosen = list(plan)
    while changes := list(_changes(groups, chosen, limit)):
        _, group, option = max(changes, key=lambda change: change[0])
        chosen[group] = option
    return tuple(chosen)


def _changes(groups: Groups, plan: Sequence[int], limit: float) -> Iterator[tuple[float, int, int]]:
    """Changes of one group that save cost and keep the limit: what they save for their weight, group and option."""
    total = total_weight(groups, tuple(plan))
    for group, options in enumerate(groups):
        now = options[plan[group]]
        for index, option in enumerate(options):
            more = option.weight - now.weight
            if option.cost < now.cost and total + more <= limit:
                changed = (*plan[:group], index, *plan[group + 1 :])
                # In the order of the groups, so that what is promised is what `total_weight` says.
                if total_weight(groups, changed) <= limit:
                    yield (now.cost - option.cost) / more if more > 0 else float("inf"), group, index


def _search(groups: Groups, limit: float, multiplier: float, plan: Plan) -> Plan | None:
    """A cheaper plan than this one, if the partial plans that are carried lead to one.

    No completion of a partial plan is cheaper than its cost with the others' least of cost + multiplier * weight, less
    what the limit's rest is worth: partial plans for which that is above the best plan known are dropped.
    """
    least = [min(option.cost + multiplier * option.weight for option in options) for options in groups]
    lightest_rest = list(accumulate((min(o.weight for o in options) for options in reversed(groups)), initial=0.0))
    known = total_cost(groups, plan)
    slack = _TOLERANCE * (abs(known) + multiplier * abs(limit))
    states, rest = [_State(0.0, 0.0)], sum(least)
    for done, options in enumerate(groups, start=1):
        rest -= least[done - 1]
        room = limit - lightest_rest[len(groups) - done] + _TOLERANCE * abs(limit)
        # At most this cost + multiplier * weight.
        allowed = known + multiplier * limit - rest + slack
        grown = [
            _State(weight, cost, index, state)
            for state in states
            for index, option in enumerate(options)
            if (weight := state.weight + option.weight) <= room
            and (cost := state.cost + option.cost) + multiplier * weight <= allowed
        ]
        states = _undominated(grown)
        if len(states) > MAX_STATES:
            states = sorted(states, key=lambda state: state.cost + multiplier * state.weight)[:MAX_STATES]
    for state in sorted(states, key=lambda state: state.cost):
        if total_weight(groups, better := _plan(state)) <= limit:
            return better if total_cost(groups, better) < known else None
    return None


def _undominated(states: list[_State]) -> list[_State]:
    """Those that no other equals or betters in both weight and cost, by weight."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.weight, state.cost)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    return kept


def _plan(state: _State) -> Plan:
    options = []
    last: _State | None = state
    while last is not None and last.parent is not None:
        options.append(last.option)
        last = last.parent
    return tuple(reversed(options))
