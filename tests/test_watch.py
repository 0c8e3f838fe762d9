"""Who hangs: scripts of observations on a clock that the test turns."""

import os
import time

import pytest

from coordinator.processes.accounting import cpu_seconds
from coordinator.processes.restarts import MAX_DEATHS, WINDOW_NS, Restarts
from coordinator.processes.watch import (
    COMPUTE_BUSY_NS,
    COMPUTE_HANG_FACTOR,
    COMPUTE_HANG_NS,
    HTTP_HANG_NS,
    IO_HANG_NS,
    MAX_GAP_NS,
    START_HANG_NS,
    Watch,
)

SECOND = 1_000_000_000


def test_progress_and_its_absence() -> None:
    watch = Watch()
    watch.begin("io0", 0)
    watch.observe("io0", (1, 0), 1 * SECOND)
    assert not watch.io_hangs("io0", 1 * SECOND + IO_HANG_NS)
    assert watch.io_hangs("io0", 1 * SECOND + IO_HANG_NS + 1)
    watch.observe("io0", (1, 0), 3 * SECOND)  # the same figures are no progress
    assert watch.io_hangs("io0", 1 * SECOND + IO_HANG_NS + 1)
    watch.observe("io0", (1, 64), 3 * SECOND)  # a slow disk moves its counters
    assert not watch.io_hangs("io0", 3 * SECOND + IO_HANG_NS)


def test_rest_is_no_hang() -> None:
    watch = Watch()
    watch.begin("io0", 0)
    watch.observe("io0", (1,), 0)
    watch.rest("io0", 100 * SECOND)
    assert not watch.io_hangs("io0", 102 * SECOND)
    assert watch.io_hangs("io0", 104 * SECOND)


def test_time_in_which_nobody_looked_counts_for_nobody() -> None:
    """All processes were stopped at once, and the one that judges is the first to go on."""
    watch, tick = Watch(), SECOND // 2
    watch.begin("http", 0)
    for now in (tick, 2 * tick, 3 * tick):
        watch.look(now)
        watch.observe("http", (1,), now)
    later = 3 * tick + 2 * HTTP_HANG_NS
    watch.look(later)
    watch.observe("http", (1,), later)
    assert not watch.http_hangs("http", later)
    for now in range(later, later + HTTP_HANG_NS - tick, MAX_GAP_NS):  # a slow loop is no pause
        watch.look(now)
        assert not watch.http_hangs("http", now)
    assert watch.http_hangs("http", later + HTTP_HANG_NS)


def test_who_began_after_the_pause_began_then() -> None:
    watch = Watch()
    watch.look(0)
    watch.begin("io0", 20 * SECOND)
    watch.look(20 * SECOND + 1)
    assert not watch.io_hangs("io0", 20 * SECOND + IO_HANG_NS)
    assert watch.io_hangs("io0", 20 * SECOND + 1 + IO_HANG_NS + 1)


def test_a_process_nobody_began_does_not_hang() -> None:
    watch = Watch()
    watch.rest("io7", 5)
    assert not watch.io_hangs("io7", 10**18)
    watch.begin("io7", 0)
    watch.forget("io7")
    assert not watch.io_hangs("io7", 10**18)


def test_compute_may_take_twenty_times_its_slowest_part() -> None:
    watch = Watch()
    watch.begin("compute", 0)
    for number, now in enumerate((1, 2, 6), start=1):  # the slowest took 4 s
        watch.observe("compute", (number,), now * SECOND)
    limit = COMPUTE_HANG_FACTOR * 4 * SECOND
    assert limit > COMPUTE_HANG_NS
    assert not watch.compute_hangs("compute", 6 * SECOND + limit)
    assert watch.compute_hangs("compute", 6 * SECOND + limit + 1)


def test_a_slow_start_does_not_lengthen_the_limit() -> None:
    watch = Watch()
    watch.begin("compute", 0)
    watch.observe("compute", (1,), 60 * SECOND)  # dense weights from a slow disk
    assert not watch.start_hangs("compute", 60 * SECOND + START_HANG_NS)
    assert watch.start_hangs("compute", 60 * SECOND + START_HANG_NS + 1)
    watch.begin("compute", 70 * SECOND)  # ready
    assert watch.compute_hangs("compute", 70 * SECOND + COMPUTE_HANG_NS + 1)
    assert not watch.compute_hangs("compute", 70 * SECOND + COMPUTE_HANG_NS)


def test_a_busy_compute_has_longer_and_not_for_ever() -> None:
    """Its processor time moves, its layers do not."""
    watch = Watch()
    watch.begin("compute", 0)
    watch.observe("compute: layers", (3,), 0)
    for second in range(0, COMPUTE_BUSY_NS // SECOND + 1, 20):
        watch.observe("compute", (3, second), second * SECOND)
        assert not watch.compute_hangs("compute", (second + 20) * SECOND)
    assert not watch.compute_loops("compute: layers", COMPUTE_BUSY_NS)
    assert watch.compute_loops("compute: layers", COMPUTE_BUSY_NS + 1)


def test_processor_time_of_a_process() -> None:
    before = cpu_seconds(os.getpid())
    stop = time.process_time() + 1.2
    while time.process_time() < stop:
        pass
    assert cpu_seconds(os.getpid()) >= before + 1
    assert cpu_seconds(2**22 + 1) == 0


@pytest.mark.parametrize("gap_ns", [0, SECOND, WINDOW_NS // MAX_DEATHS - 1])
def test_too_many_deaths_within_the_window(gap_ns: int) -> None:
    restarts = Restarts()
    assert restarts.is_first("io0")
    allowed = [restarts.allowed("io0", n * gap_ns) for n in range(MAX_DEATHS + 1)]
    assert allowed == [True] * MAX_DEATHS + [False]
    assert restarts.counts == {"io0": MAX_DEATHS}
    assert not restarts.is_first("io0")


def test_deaths_far_apart_are_forgiven() -> None:
    restarts = Restarts()
    assert all(restarts.allowed("io0", n * WINDOW_NS // MAX_DEATHS) for n in range(100))


def test_deaths_of_others_do_not_count() -> None:
    restarts = Restarts()
    assert all(restarts.allowed(f"io{number}", 5) for number in range(50))
