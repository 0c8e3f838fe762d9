"""The pipe through which readers tell compute that a slab is there."""

import os
from collections.abc import Iterator

import pytest

from shm.messages import ReadSpan, SlabNotice, SlotLease
from shm.notices import give_notice, notice_pipe, take_notices


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = notice_pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_notices_come_in_order_and_once(pipe: tuple[int, int]) -> None:
    notice_fd, tell_fd = pipe
    given = [SlabNotice(SlotLease(n, n + 2**40), ReadSpan(n, n + 2**62)) for n in range(3)]
    assert take_notices(notice_fd) == []
    assert all(give_notice(tell_fd, notice.lease, notice.span) for notice in given)
    assert take_notices(notice_fd) == given
    assert take_notices(notice_fd) == []


def test_a_full_pipe_is_told_and_loses_nothing_that_was_given(pipe: tuple[int, int]) -> None:
    notice_fd, tell_fd = pipe
    n_given = 0
    while give_notice(tell_fd, SlotLease(n_given, 1), ReadSpan(1, 2)):
        n_given += 1
    found = [notice.lease.slot for notice in take_notices(notice_fd)]
    while more := take_notices(notice_fd):
        found += [notice.lease.slot for notice in more]
    assert found == list(range(n_given))
    assert give_notice(tell_fd, SlotLease(0, 2), ReadSpan(1, 2))
