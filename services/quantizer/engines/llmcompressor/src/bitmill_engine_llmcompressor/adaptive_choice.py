"""One option for each group under one limit: the multiple-choice knapsack problem. Pure; no torch.

ADAPTIVE asks it both ways: the least loss within a size, and the least size within a loss. The method is Lagrangian
relaxation for a choice and a bound, then dynamic programming over what the bound leaves open (H. Kellerer, U. Pferschy,
D. Pisinger, Knapsack Problems, 2004, chapter 11).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_STATES = 1000
"""Partial choices that are carried from group to group. While no more come up the result is the best there is; of more,
those with the best bounds go on."""
# Each halves the multiplier's interval; a double has 53 bits.
_HALVINGS = 100
# Sums in another order differ by rounding: a bound prunes only what is worse by more than this.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Option:
    """What a group adds, treated one way, to the objective and to what is limited; neither is negative."""

    cost: float
    weight: float


Groups = Sequence[Sequence[Option]]
Choice = tuple[int, ...]
"""For each group the index of its option."""


@dataclass(frozen=True)
class _State:
    """Options of the first groups: the last one's by its index, the others' by the state that it goes on from."""

    weight: float
    cost: float
    option: int = -1
    parent: _State | None = None


def total_cost(groups: Groups, choice: Choice) -> float:
    """The sum of the chosen options' costs."""
    return sum(options[index].cost for options, index in zip(groups, choice, strict=True))


def total_weight(groups: Groups, choice: Choice) -> float:
    """The sum of the chosen options' weights, added in the groups' order."""
    return sum(options[index].weight for options, index in zip(groups, choice, strict=True))


def lightest(groups: Groups) -> Choice:
    """The choice of the least weight; of several, the cheapest."""
    return tuple(min(range(len(options)), key=lambda i: (options[i].weight, options[i].cost)) for options in groups)


def cheapest(groups: Groups, limit: float) -> Choice | None:
    """The choice of the least cost whose weight is not above `limit`; None when the lightest one's is."""
    if total_weight(groups, lightest(groups)) > limit:
        return None
    multiplier = _multiplier(groups, limit)
    choice = _fill(groups, _relaxed(groups, multiplier), limit)
    return _search(groups, limit, multiplier, choice) or choice


def cheapest_that_holds(
    groups: Groups, guess: float, holds: Callable[[Choice], bool], max_trials: int
) -> Choice | None:
    """The cheapest choice that `holds`, of those that are the cheapest within some limit; None when the lightest fails.

    For what weights only predict: the limit starts at `guess` and is moved by doubling and bisection, as if a choice
    within a lower limit held whenever one within a higher limit does. `holds` is called `max_trials` + 1 times at most.
    """
    least, known = lightest(groups), dict[Choice, bool]()
    low, high = total_weight(groups, least), total_weight(groups, _relaxed(groups, 0))
    limit, holding, failing = min(max(guess, low), high), None, math.inf
    for _ in range(max_trials):
        choice = cheapest(groups, limit) or least
        if choice not in known:
            known[choice] = holds(choice)
        if known[choice]:
            holding = limit
            if limit >= high:
                break
            limit = min(2 * limit, high) if failing == math.inf else math.sqrt(limit * failing)
        else:
            failing = limit
            if limit <= low:
                return None
            limit = max(limit / 2, low) if holding is None else math.sqrt(limit * holding)
    held = [choice for choice, held in known.items() if held]
    if held:
        return min(held, key=lambda choice: total_cost(groups, choice))
    return least if least not in known and holds(least) else None


def _relaxed(groups: Groups, multiplier: float) -> Choice:
    """The least of cost + multiplier * weight in each group; of several, the lightest."""
    return tuple(
        min(range(len(options)), key=lambda i: (options[i].cost + multiplier * options[i].weight, options[i].weight))
        for options in groups
    )


def _multiplier(groups: Groups, limit: float) -> float:
    """The least price of weight, but for a small rest, at which the relaxed choice keeps the limit."""
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


def _fill(groups: Groups, choice: Choice, limit: float) -> Choice:
    """Spend what the limit still allows on the changes that save the most cost for their weight."""
    chosen = list(choice)
    while changes := list(_changes(groups, chosen, limit)):
        _, group, option = max(changes, key=lambda change: change[0])
        chosen[group] = option
    return tuple(chosen)


def _changes(groups: Groups, choice: Sequence[int], limit: float) -> Iterator[tuple[float, int, int]]:
    """Changes of one group that save cost and keep the limit: what they save for their weight, group and option."""
    total = total_weight(groups, tuple(choice))
    for group, options in enumerate(groups):
        now = options[choice[group]]
        for index, option in enumerate(options):
            more = option.weight - now.weight
            if option.cost < now.cost and total + more <= limit:
                changed = (*choice[:group], index, *choice[group + 1 :])
                # In the order of the groups, so that what is promised is what `total_weight` says.
                if total_weight(groups, changed) <= limit:
                    yield (now.cost - option.cost) / more if more > 0 else float("inf"), group, index


def _search(groups: Groups, limit: float, multiplier: float, choice: Choice) -> Choice | None:
    """A cheaper choice than this one, if the partial choices that are carried lead to one.

    No completion of a partial choice is cheaper than its cost with the others' least of cost + multiplier * weight,
    less what the limit's rest is worth: partial choices for which that is above the best choice known are dropped.
    """
    least = [min(option.cost + multiplier * option.weight for option in options) for options in groups]
    lightest_rest = list(accumulate((min(o.weight for o in options) for options in reversed(groups)), initial=0.0))
    known = total_cost(groups, choice)
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
        if total_weight(groups, better := _choice(state)) <= limit:
            return better if total_cost(groups, better) < known else None
    return None


def _undominated(states: list[_State]) -> list[_State]:
    """Those that no other equals or betters in both weight and cost, by weight."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.weight, state.cost)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    return kept


def _choice(state: _State) -> Choice:
    options = []
    last: _State | None = state
    while last is not None and last.parent is not None:
        options.append(last.option)
        last = last.parent
    return tuple(reversed(options))
