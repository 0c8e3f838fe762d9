"""Medians, and ratios of paired measurements with the interval that the data allow.

Pure functions of numbers. A pair is two blocks of one round: they ran close together, so what else
the machine did is in both and mostly leaves their ratio alone. An interval that includes 1 claims
nothing.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

N_RESAMPLES = 10_000
LOW_SHARE, HIGH_SHARE = 0.025, 0.975  # a 95 % interval
MIN_PAIRS = 5  # the whole range of fewer covers the median in 88 of 100 cases at most
MIN_DRIFT_VALUES = 6
DRIFT_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios; `low` and `high` bound its 95 % interval, None with too few."""

    n_pairs: int
    median: float
    low: float | None
    high: float | None

    @property
    def excludes_one(self) -> bool:
        """Whether there is a difference to speak of."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def paired_ratio(
    values: Sequence[float | None], references: Sequence[float | None]
) -> Ratio | None:
    """values ÷ references, round by round; a pair with a gap (None, 0) is left out.

    None if no pair is whole; for the interval see `median_interval`.
    """
    pairs = zip(values, references, strict=True)
    ratios = [value / reference for value, reference in pairs if value and reference]
    if not ratios:
        return None
    low, high = median_interval(ratios) if len(ratios) >= MIN_PAIRS else (None, None)
    return Ratio(len(ratios), statistics.median(ratios), low, high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median; the same values give the same one.

    The percentile bootstrap (Efron, 1979), widened where it is too narrow: of few values it covers
    the median less often than it says, of 7 in 87 of 100 cases. The two values of the order that
    cover it in at least 95, whatever the distribution (those of the sign test), always lie within.
    Of 5 values it is their whole range, which covers it in 94.
    """
    draw = random.Random(0)
    n = len(values)
    medians = sorted(statistics.median(draw.choices(values, k=n)) for _ in range(N_RESAMPLES))
    low, high = medians[int(LOW_SHARE * N_RESAMPLES)], medians[int(HIGH_SHARE * N_RESAMPLES) - 1]
    n_beyond = _n_beyond(n)
    in_order = sorted(values)
    return min(low, in_order[n_beyond]), max(high, in_order[n - 1 - n_beyond])


def _n_beyond(n: int) -> int:
    """How many of n values may lie beyond each end of an interval that covers the median in 95 of
    100 cases: each value is above the median as likely as below it."""
    n_beyond, share = 0, 1 / 2**n
    while share + math.comb(n, n_beyond + 1) / 2**n <= LOW_SHARE:
        n_beyond += 1
        share += math.comb(n, n_beyond) / 2**n
    return n_beyond


def median(values: Sequence[float | None]) -> float | None:
    """Median of those that are there; None if none is."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def drift(values: Sequence[float | None]) -> float | None:
    """How much the second half's median differs from the first's, as a share of it.

    None if there are too few values or the difference is too small to warn of.
    """
    found = [value for value in values if value is not None]
    if len(found) < MIN_DRIFT_VALUES:
        return None
    half = len(found) // 2
    first, second = statistics.median(found[:half]), statistics.median(found[-half:])
    change = second / first - 1 if first else 0.0
    return change if abs(change) >= DRIFT_SHARE else None
