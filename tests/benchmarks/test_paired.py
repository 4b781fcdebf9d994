"""Paired ratios: known quantiles, known intervals, and drift that cancels."""

from __future__ import annotations

import random

import pytest

from benchmarks.support.paired import paired_ratio, t_quantile
from benchmarks.workers.step_timing import order_of_round


@pytest.mark.parametrize(("degrees", "expected"), [(2, 4.3027), (5, 2.5706), (11, 2.2010), (19, 2.0930), (120, 1.9799)])
def test_t_quantile_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


def test_paired_ratio_cancels_common_drift() -> None:
    below = [1.0, 5.0, 0.2, 40.0]
    found = paired_ratio([1.5 * value for value in below], below)
    assert (found.low, found.ratio, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_paired_interval_covers_the_truth_in_95_percent() -> None:
    noise = random.Random(0)
    covered = 0
    for _ in range(400):
        below = [noise.lognormvariate(0, 0.5) for _ in range(8)]
        above = [1.2 * value * noise.lognormvariate(0, 0.1) for value in below]
        found = paired_ratio(above, below)
        covered += found.low <= 1.2 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_paired_ratio_refuses_too_few_pairs() -> None:
    with pytest.raises(ValueError, match="got 2"):
        paired_ratio([1.0, 2.0], [1.0, 2.0])


def test_rounds_balance_the_order_of_variants() -> None:
    names = ["a", "b", "c"]
    orders = [order_of_round(names, number) for number in range(2 * len(names))]
    assert {tuple(sorted(order)) for order in orders} == {("a", "b", "c")}
    for one in names:
        for other in set(names) - {one}:
            assert sum(order.index(one) < order.index(other) for order in orders) == len(orders) / 2
