"""The union of spans, in any order in which reads may answer."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.busy_time import MAX_KEPT, BusyTime

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=MAX_KEPT)


def busy(*spans: tuple[int, int]) -> int:
    time = BusyTime()
    for start, stop in spans:
        time.add(start, stop)
    return time.total_ns


def test_apart_inside_touching_and_bridging() -> None:
    assert busy() == 0
    assert busy((0, 5), (7, 9)) == 7
    assert busy((5, 8), (0, 10)) == 10
    assert busy((0, 10), (5, 8)) == 10
    assert busy((0, 5), (5, 8)) == 8
    assert busy((0, 3), (6, 9), (2, 7)) == 9


@given(SPANS)
def test_the_union_in_any_order(spans: list[tuple[int, int]]) -> None:
    union = {moment for start, length in spans for moment in range(start, start + length)}
    assert busy(*[(start, start + length) for start, length in spans]) == len(union)


def test_a_long_run_keeps_few() -> None:
    """Reads of depth 4 whose answers come in pairs the wrong way round."""
    order = [n + 1 - 2 * (n % 2) for n in range(4000)]
    assert busy(*[(10 * n, 10 * n + 7) for n in order]) == 7 * 4000
