"""How ADAPTIVE chooses under a budget, against every plan there is."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_engine_llmcompressor.adaptive_choice import (
    MAX_STATES,
    Choice,
    Option,
    cheapest,
    cheapest_that_holds,
    lightest,
    total_cost,
    total_weight,
)

Groups = list[list[Option]]

losses = st.floats(0, 10, allow_nan=False, allow_subnormal=False)
sizes = st.integers(0, 10**10)
small_sizes = st.integers(0, 12)


def groups_of(cost: st.SearchStrategy[float], weight: st.SearchStrategy[float]) -> st.SearchStrategy[Groups]:
    option = st.builds(Option, cost=cost, weight=weight)
    return st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=6)


def every_plan(groups: Groups) -> list[Choice]:
    return list(product(*(range(len(options)) for options in groups)))


@given(groups=groups_of(losses, sizes) | groups_of(losses, small_sizes), part=st.floats(0, 1.1))
def test_the_plan_is_the_cheapest_of_all_that_keep_the_limit(groups: Groups, part: float) -> None:
    """Sizes of any kind: in bytes of billions, or so few that many plans weigh the same."""
    least, most = (sum(choose(o.weight for o in options) for options in groups) for choose in (min, max))
    limit = int(least + part * (most - least))
    plan = cheapest(groups, limit)
    assert plan is not None
    assert total_weight(groups, plan) <= limit
    best = min(total_cost(groups, other) for other in every_plan(groups) if total_weight(groups, other) <= limit)
    assert total_cost(groups, plan) == pytest.approx(best, rel=1e-9, abs=1e-12)


@given(groups=groups_of(sizes, losses), part=st.floats(0, 1.1))
def test_the_least_size_within_a_loss_is_found_too(groups: Groups, part: float) -> None:
    """The limit may be on what is no whole number, and is kept to the last digit."""
    least, most = (sum(choose(o.weight for o in options) for options in groups) for choose in (min, max))
    limit = max(least, least + part * (most - least))
    plan = cheapest(groups, limit)
    assert plan is not None
    assert total_weight(groups, plan) <= limit
    best = min(total_cost(groups, other) for other in every_plan(groups) if total_weight(groups, other) <= limit)
    assert total_cost(groups, plan) <= best * (1 + 1e-9)


@given(groups=groups_of(losses, sizes))
def test_a_limit_below_the_lightest_plan_has_no_plan(groups: Groups) -> None:
    """And one of exactly its weight has that one, or a cheaper one of the same weight."""
    least = total_weight(groups, lightest(groups))
    assert least == min(total_weight(groups, plan) for plan in every_plan(groups))
    assert cheapest(groups, least - 1) is None
    plan = cheapest(groups, least)
    assert plan is not None
    assert total_weight(groups, plan) == least


@given(groups=groups_of(losses, small_sizes), limit=st.integers(0, 72))
def test_more_room_never_costs_more(groups: Groups, limit: int) -> None:
    """The least loss falls, or stays, as the budget grows."""
    tight, wide = cheapest(groups, limit), cheapest(groups, limit + 1)
    if tight is not None:
        assert wide is not None
        assert total_cost(groups, wide) <= total_cost(groups, tight) * (1 + 1e-9)


def test_a_model_of_a_hundred_layers_is_planned_to_within_a_thousandth() -> None:
    """400 groups whose losses differ by orders of magnitude: the plan is as good as no plan can be by much more."""
    generator = random.Random(0)
    groups = []
    for _ in range(400):
        sensitivity = generator.lognormvariate(-7, 2)
        weights = generator.choice((9_437_184, 37_748_736, 25_165_824))
        groups.append(
            [
                Option(sensitivity * noise * generator.uniform(0.8, 1.2), round(weights * bits / 8))
                for bits, noise in ((4.03, 2.0), (4.25, 1.3), (4.5, 1.0), (8.03, 0.01), (16, 0.0))
            ]
        )
    limit = round(sum(options[1].weight for options in groups))
    plan = cheapest(groups, limit)
    assert plan is not None
    assert total_weight(groups, plan) <= limit
    # Every price of a byte bounds all plans from below; the best of a dense row of prices is nearly the best bound.
    bound = max(
        sum(min(o.cost + price * o.weight for o in options) for options in groups) - price * limit
        for price in (10 ** (exponent / 200) for exponent in range(-3000, -1000))
    )
    assert bound <= total_cost(groups, plan) <= bound * 1.001
    assert total_cost(groups, plan) < 0.5 * total_cost(groups, (1,) * 400)
    assert MAX_STATES >= 100


@given(
    groups=groups_of(small_sizes.map(float), losses),
    factor=st.floats(0.2, 5),
    most=st.floats(0, 60),
    guess=st.floats(0, 60),
)
def test_a_choice_that_holds_as_measured_is_found_where_the_prediction_is_off(
    groups: Groups, factor: float, most: float, guess: float
) -> None:
    """What is measured is some multiple of what is predicted: the result keeps the limit, and so does no cheaper one of
    those that a limit on the prediction gives, but for the width that the trials leave."""
    trials: list[Choice] = []

    def holds(choice: Choice) -> bool:
        trials.append(choice)
        return factor * total_weight(groups, choice) <= most

    choice = cheapest_that_holds(groups, guess, holds, 12)
    assert len(trials) <= 13
    assert len(set(trials)) == len(trials)
    if choice is None:
        assert factor * total_weight(groups, lightest(groups)) > most
        return
    assert factor * total_weight(groups, choice) <= most
    tighter = cheapest(groups, most / factor * 0.9)
    assert tighter is None or total_cost(groups, choice) <= total_cost(groups, tighter) or most / factor > 16 * guess
