"""Ratios of paired measurements: what is claimed, and how often it is right."""

import math
import random
import statistics

import pytest

from coordinator.bench.statistics import (
    MIN_PAIRS,
    drift,
    median,
    median_interval,
    paired_ratio,
)


def test_ratios_are_taken_pair_by_pair() -> None:
    # the machine was twice as slow in the second round: the ratio does not see it
    ratio = paired_ratio([20.0, 10.0, 22.0, 20.0, 42.0], [10.0, 5.0, 10.0, 10.0, 20.0])
    assert ratio is not None
    assert (ratio.n_pairs, ratio.median, ratio.low, ratio.high) == (5, 2.0, 2.0, 2.2)
    assert ratio.excludes_one


@pytest.mark.parametrize(
    ("values", "references", "n_pairs", "has_interval"),
    [
        ([1.0, None, *[3.0] * (MIN_PAIRS - 1)], [1.0, 2.0, *[3.0] * (MIN_PAIRS - 1)], 5, True),
        ([1.0, None, *[3.0] * (MIN_PAIRS - 2)], [1.0, 2.0, *[3.0] * (MIN_PAIRS - 2)], 4, False),
        ([1.0, 2.0], [0.0, 2.0], 1, False),
        ([5.0], [4.0], 1, False),
    ],
)
def test_a_pair_with_a_gap_is_left_out(
    values: list[float | None],
    references: list[float | None],
    n_pairs: int,
    has_interval: bool,
) -> None:
    ratio = paired_ratio(values, references)
    assert ratio is not None
    assert ratio.n_pairs == n_pairs
    assert (ratio.low is not None) == has_interval
    assert has_interval or not ratio.excludes_one


def test_no_whole_pair_has_no_ratio() -> None:
    assert paired_ratio([None, 1.0], [1.0, None]) is None
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_the_interval_holds_the_median_and_grows_with_the_noise() -> None:
    draw = random.Random(7)
    quiet = [1 + 0.01 * draw.gauss(0, 1) for _ in range(15)]
    noisy = [1 + 0.10 * draw.gauss(0, 1) for _ in range(15)]
    spans = []
    for values in (quiet, noisy):
        low, high = median_interval(values)
        assert min(values) <= low <= statistics.median(values) <= high <= max(values)
        assert (low, high) == median_interval(values)
        spans.append(high - low)
    assert spans[1] > 3 * spans[0]


@pytest.mark.parametrize(
    ("n", "n_beyond"), [(5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (14, 2), (15, 3), (30, 9)]
)
def test_an_interval_is_never_narrower_than_the_sign_test_has_it(n: int, n_beyond: int) -> None:
    """Conover, Practical Nonparametric Statistics, table of the binomial: 95 % of cases."""
    values = [math.exp(i) for i in range(n)]  # far apart: a mean of two is none of them
    low, high = median_interval(values)
    assert low <= values[n_beyond]
    assert high >= values[n - 1 - n_beyond]


def test_intervals_cover_the_median_as_often_as_they_say() -> None:
    draw = random.Random(11)
    n_missed = 0
    for _ in range(150):
        low, high = median_interval([draw.gauss(0, 1) for _ in range(7)])
        n_missed += not low <= 0 <= high
    assert n_missed <= 8, "1 or 2 of 100 are to be expected, resampling alone misses 13"


def test_equal_arms_are_called_equal_and_different_ones_different() -> None:
    draw = random.Random(3)

    def claims(factor: float, n_pairs: int) -> int:
        n_claims = 0
        for _ in range(40):
            values = [factor * draw.lognormvariate(0, 0.05) for _ in range(n_pairs)]
            ratio = paired_ratio(values, [draw.lognormvariate(0, 0.05) for _ in range(n_pairs)])
            assert ratio is not None
            n_claims += ratio.excludes_one
        return n_claims

    assert claims(1.0, 5) <= 8  # 1 in 16 is to be expected
    assert claims(1.0, 12) <= 8
    assert claims(1.3, 8) >= 36


def test_medians_skip_what_failed() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10, 10, 10, 8, 8, 8], -0.2),
        ([10, 10.5, 10, 10, 10.5, 10.5], None),
        ([10, 5], None),
        ([None, 10, 10, 10, 12, 12, 12], 0.2),
    ],
)
def test_drift(values: list[float | None], expected: float | None) -> None:
    assert drift(values) == (pytest.approx(expected) if expected is not None else None)
