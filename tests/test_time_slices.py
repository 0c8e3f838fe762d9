"""Slices of the processor: set for the thread that asks and those that it starts, or left alone."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shm import time_slices
from shm.time_slices import DEFAULT_NANOSECONDS, SHORT_NANOSECONDS, set_slice

SCHED = Path("/proc/thread-self/sched")


def slice_nanoseconds() -> int | None:
    """What the kernel says of this thread; None where it does not."""
    found = re.search(r"^se\.slice\s*:\s*(\d+)$", SCHED.read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def in_a_thread(job: Callable[[], None]) -> None:
    """Nothing of it stays with the test's own thread."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.skipif(not SCHED.exists(), reason="a kernel without CONFIG_SCHED_DEBUG")
def test_a_short_slice_goes_to_new_threads_and_can_be_given_up() -> None:
    before = slice_nanoseconds()  # another test may have made it short

    def job() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        if before is None or not set_slice(DEFAULT_NANOSECONDS):
            pytest.skip("a kernel before 6.12")
        default = slice_nanoseconds()
        assert default != SHORT_NANOSECONDS
        assert set_slice(SHORT_NANOSECONDS)
        assert slice_nanoseconds() == SHORT_NANOSECONDS
        inherited: list[int | None] = []
        in_a_thread(lambda: inherited.append(slice_nanoseconds()))
        assert inherited == [SHORT_NANOSECONDS]
        assert set_slice(DEFAULT_NANOSECONDS)
        assert slice_nanoseconds() == default
        assert os.getpriority(os.PRIO_PROCESS, 0) == nice

    in_a_thread(job)
    assert slice_nanoseconds() == before


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slices.platform, "machine", lambda: "pdp11")
    assert not set_slice(SHORT_NANOSECONDS)


def test_another_scheduling_policy_is_left_alone() -> None:
    def job() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        assert not set_slice(SHORT_NANOSECONDS)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_a_thread(job)
