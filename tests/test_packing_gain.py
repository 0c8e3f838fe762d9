"""When packing pays: by the speeds of bursts, and what else a token takes."""

import pytest

from coordinator.plan.forecast import ComputeTimes, Measured, Pool, Shape, forecasts
from coordinator.plan.packing_gain import PackingGain, packing_gain

SHAPE = Shape(n_layers=16, n_experts=64, n_active=8, slab_bytes=4 << 20, dense_bytes=200 << 20)


def gain(plain: float, packed: float, compute: float, n_slots: int) -> PackingGain:
    """Seconds of a burst of 8 experts by layout, seconds of one expert's arithmetic."""
    pool = Pool(n_slots, 64, 100)
    times = ComputeTimes(1, 0.001, compute)
    measured = [Measured({8: seconds}, times, times) for seconds in (plain, packed)]
    plain_forecasts, packed_forecasts = (forecasts(SHAPE, each, pool) for each in measured)
    return packing_gain(*measured, SHAPE.n_active, plain_forecasts, packed_forecasts)


@pytest.mark.parametrize(
    ("plain", "packed", "compute", "n_slots", "is_worth_it"),
    [
        (0.020, 0.010, 0.0001, 200, True),
        (0.020, 0.0198, 0.0001, 200, False),
        (0.020, 0.022, 0.0001, 200, False),
        (0.020, 0.010, 0.0500, 200, False),  # the cores decide
        (0.020, 0.010, 0.0001, 1024, False),  # nothing is read
    ],
)
def test_it_is_worth_it_where_the_disk_decides(
    plain: float, packed: float, compute: float, n_slots: int, is_worth_it: bool
) -> None:
    found = gain(plain, packed, compute, n_slots)
    assert found.is_worth_it == is_worth_it
    assert f"packing: {'worth it' if is_worth_it else 'not worth it'}: " in found.describe()
    assert found.as_json()["is_worth_it"] == is_worth_it


def test_the_gain_is_at_most_that_of_the_disk() -> None:
    found = gain(0.020, 0.010, 0.0001, 200)
    assert all(1.2 < times < 2 for times in found.gains.values())


def test_a_gain_of_single_experts_alone_is_noise() -> None:
    """On a disk of 150 MB/s: 204 ms in place of 194 for a token's experts, and 1.27 times the speed
    by a single one that came fast."""
    assert not PackingGain(0.194, 0.204, {"even": 1.27, "concentrated": 1.04}).is_worth_it
    assert PackingGain(0.204, 0.194, {"even": 1.27, "concentrated": 1.04}).is_worth_it
