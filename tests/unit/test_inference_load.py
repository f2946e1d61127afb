"""Token rates out of counters that are sampled."""

from __future__ import annotations

import pytest

from bitmill_inference.models.load import SAMPLE_INTERVAL_S, WINDOW_S, TokenRates


def sampled(counts: list[tuple[int, int]], start: float = 100.0) -> tuple[TokenRates, float]:
    """Rates that have seen the counters once each interval, and the time of the last sample."""
    rates = TokenRates()
    for number, (prompt, generation) in enumerate(counts):
        rates.sample(start + number * SAMPLE_INTERVAL_S, prompt, generation)
    return rates, start + (len(counts) - 1) * SAMPLE_INTERVAL_S


def test_a_steady_engine_has_its_rate() -> None:
    rates, now = sampled([(20 * second, 50 * second) for second in range(1, 41)])
    assert rates.rates(now, 800, 2000) == (20, 50)


def test_between_samples_the_counters_of_now_count() -> None:
    rates, now = sampled([(0, 50 * second) for second in range(1, 41)])
    assert rates.rates(now + 0.5, 0, 2025) == (0, pytest.approx(50))


def test_what_is_longer_ago_than_the_window_does_not_count() -> None:
    idle = int(WINDOW_S / SAMPLE_INTERVAL_S) + 1
    rates, now = sampled([(500, 1000)] * (1 + idle))
    assert rates.rates(now, 500, 1000) == (0, 0)


def test_a_burst_counts_over_the_whole_window() -> None:
    rates, now = sampled([(0, 0)] * 20 + [(0, 100)])
    assert rates.rates(now, 0, 100) == (0, 100 / WINDOW_S)


def test_an_engine_that_has_just_started_counts_from_its_start() -> None:
    """Its first tokens are not lost, and a moment does not make a rate of thousands."""
    rates, now = sampled([(10, 30)])
    assert rates.rates(now, 10, 30) == (10 / SAMPLE_INTERVAL_S, 30 / SAMPLE_INTERVAL_S)


def test_before_the_first_sample_there_is_no_rate() -> None:
    assert TokenRates().rates(100.0, 5, 5) == (0, 0)
