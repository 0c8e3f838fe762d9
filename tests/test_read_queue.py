import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from read_cases import (
    GUARD,
    Fault,
    FaultyPreadv,
    content,
    opened,
    pattern,
    pool_of,
    slab_at,
    strict_direct,
    write_file,
)

from io_worker.read_queue import Completion, ReadQueue
from io_worker.slab_reader import READERS, SlabReader
from shm.messages import ReadFailed, SlabRead, SlabsReady, SlotLease
from shm.notices import notice_pipe, take_notices
from shm.pool import PoolMapping

FILE_BYTES = 400_009
DATA = pattern(FILE_BYTES)
SLAB_BYTES = 30_000
N_SLOTS = 6
OFFSETS = [
    (slot * 61, 100_000 + slot * 4097, FILE_BYTES - SLAB_BYTES - slot * 32)
    for slot in range(N_SLOTS)
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf", DATA)


def slabs(pool: PoolMapping, generation: int = 1) -> list[SlabRead]:
    return [slab_at(pool, slot, OFFSETS[slot], SLAB_BYTES, generation) for slot in range(N_SLOTS)]


def collect(queue: ReadQueue, n_wanted: int) -> list[Completion]:
    """Wait on the eventfd, as an owner's poll loop does."""
    found: list[Completion] = []
    while len(found) < n_wanted:
        readable, _, _ = select.select([queue.completion_fd], [], [], 20)
        assert readable, f"{len(found)} of {n_wanted} answers"
        found += queue.collect()
    return found


def assert_right(pool: PoolMapping, read: SlabRead) -> None:
    for wanted in read.ranges:
        start = wanted.file_offset
        assert content(pool, wanted) == DATA[start : start + wanted.n_bytes], wanted
    assert pool.holds(read.lease.slot, read.lease.generation, read.layer, read.expert)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("n_threads", [0, 1, 2, 8])
def test_every_slab_is_answered_once_and_right(model: Path, reader: str, n_threads: int) -> None:
    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(n_threads, SlabReader([file], pool.view, reader), pool)
        for generation in (1, 2):
            before = time.monotonic_ns()
            reads = slabs(pool, generation)
            queue.submit(reads)
            answers = collect(queue, N_SLOTS)
            assert not queue.collect()
            assert sorted(a.lease.slot for a in answers) == list(range(N_SLOTS))
            for answer in answers:
                assert isinstance(answer, SlabsReady), answer
                assert answer.lease.generation == generation
                assert answer.bytes_read == 3 * SLAB_BYTES
                assert before <= answer.start_ns <= answer.stop_ns <= time.monotonic_ns()
            for read in reads:
                assert_right(pool, read)
        assert (queue.n_done, queue.n_in_flight) == (2 * N_SLOTS, 0)
        if n_threads <= 1:
            assert [a.lease.slot for a in answers] == list(range(N_SLOTS)), "first in, first out"
        assert queue.close()


FAULTS = [
    ("EIO", False),
    ("EIO", True),
    ("EINVAL", False),
    ("EFAULT", False),
    ("EOPNOTSUPP", False),
    ("half", False),
    ("half", True),
    ("one byte", False),
    ("nothing", False),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("kind", "is_lasting"), FAULTS)
def test_a_fault_at_any_call_gives_right_bytes_or_a_failure(
    model: Path, reader: str, kind: str, is_lasting: bool
) -> None:
    """The n-th call fails, for n = 1, 2, 3 … until a run makes fewer calls than n."""
    first = n_calls = 1
    while first <= n_calls:
        with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
            file = strict_direct(file)
            preadv = FaultyPreadv(file.direct_fd, Fault(kind, first, is_lasting))
            queue = ReadQueue(2, SlabReader([file], pool.view, reader, preadv=preadv), pool)
            reads = slabs(pool)
            queue.submit(reads)
            answers = {answer.lease.slot: answer for answer in collect(queue, N_SLOTS)}
            n_failed = 0
            for read in reads:
                answer = answers[read.lease.slot]
                if isinstance(answer, SlabsReady):
                    assert_right(pool, read)
                else:
                    n_failed += 1
                    assert not pool.holds(read.lease.slot, 1, 3, read.expert)
                    assert f"layer 3 expert {read.expert}: " in answer.text
            assert queue.close()
            n_calls = preadv.n_calls
            if not may_fail(reader, kind, is_lasting):
                assert n_failed == 0, (first, answers)
            elif is_lasting and first <= n_calls:
                assert n_failed >= 1, (first, answers)
        first += 1
    assert first > N_SLOTS


def may_fail(reader: str, kind: str, is_lasting: bool) -> bool:
    """Refusals concern direct reading; nothing at all before the end is a truncated file."""
    if kind == "EIO":
        return is_lasting
    return reader == "buffered" and kind in ("EINVAL", "EFAULT", "EOPNOTSUPP", "nothing")


def test_the_ranges_of_a_slab_are_read_together(model: Path) -> None:
    """Each of the three reads ends when all three have begun."""
    together = threading.Barrier(3)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        together.wait(20)
        return os.preadv(fd, buffers, offset)

    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(3, SlabReader([file], pool.view, "buffered", preadv=preadv), pool)
        (read,) = slabs(pool)[:1]
        queue.submit([read])
        (answer,) = collect(queue, 1)
        assert isinstance(answer, SlabsReady)
        assert_right(pool, read)
        assert queue.close()


def test_a_slow_read_does_not_hold_up_the_others(model: Path) -> None:
    may_go_on = threading.Event()

    def slow_at_the_start(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            may_go_on.wait(20)
        return os.preadv(fd, buffers, offset)

    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        reader = SlabReader([file], pool.view, "buffered", preadv=slow_at_the_start)
        queue = ReadQueue(2, reader, pool)
        reads = slabs(pool)
        queue.submit(reads)
        others = collect(queue, N_SLOTS - 1)
        assert 0 not in {answer.lease.slot for answer in others}
        assert not pool.holds(0, 1, 3, 0), "a header before the last byte"
        may_go_on.set()
        collect(queue, 1)
        assert_right(pool, reads[0])
        assert queue.close()


def with_a_stuck_read(file_path: Path, check: Callable[[ReadQueue, PoolMapping], None]) -> None:
    """Run `check` while the first read is stuck; let go, it must have exactly one answer."""
    may_go_on = threading.Event()

    def stuck(fd: int, buffers: list[memoryview], offset: int) -> int:
        may_go_on.wait(20)
        return os.preadv(fd, buffers, offset)

    with opened(file_path) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(1, SlabReader([file], pool.view, "buffered", preadv=stuck), pool)
        queue.submit(slabs(pool)[:1])
        check(queue, pool)
        may_go_on.set()
        (answer,) = collect(queue, 1)
        assert isinstance(answer, SlabsReady)
        assert answer.lease == SlotLease(0, 1)
        assert queue.close()
        assert queue.n_in_flight == 0


def test_an_order_told_twice_is_answered_once(model: Path) -> None:
    def check(queue: ReadQueue, pool: PoolMapping) -> None:
        queue.submit(slabs(pool)[:1])
        assert queue.n_in_flight == 1

    with_a_stuck_read(model, check)


def test_a_slot_that_is_being_read_is_not_read_into_again(model: Path) -> None:
    def check(queue: ReadQueue, pool: PoolMapping) -> None:
        queue.submit(slabs(pool, generation=2)[:1])
        (answer,) = collect(queue, 1)
        assert isinstance(answer, ReadFailed)
        assert answer.lease == SlotLease(0, 2)
        assert "still being read" in answer.text
        assert queue.n_in_flight == 1

    with_a_stuck_read(model, check)


def test_bad_figures_are_answered_and_touch_nothing(model: Path) -> None:
    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(1, SlabReader([file], pool.view, "buffered"), pool)
        good = slabs(pool)[0]
        bad_range = good.ranges[2]._replace(file_offset=FILE_BYTES)
        bad = good._replace(ranges=(*good.ranges[:2], bad_range))
        queue.submit([bad])
        (answer,) = collect(queue, 1)
        assert isinstance(answer, ReadFailed)
        assert (answer.errno, answer.model_changed) == (0, False)
        assert set(pool.view) == {GUARD}
        queue.submit([good])
        assert isinstance(collect(queue, 1)[0], SlabsReady)
        assert queue.close()


@pytest.mark.parametrize("reader", READERS)
def test_a_file_written_to_fails_every_read_from_then_on(model: Path, reader: str) -> None:
    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(2, SlabReader([file], pool.view, reader), pool)
        with model.open("r+b") as writer:
            writer.write(b"changed")
        for generation in (1, 2):
            queue.submit(slabs(pool, generation))
            for answer in collect(queue, N_SLOTS):
                assert isinstance(answer, ReadFailed)
                assert answer.model_changed, answer
        assert queue.close()


def test_a_fault_of_ours_in_a_thread_reaches_the_owner(model: Path) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise AssertionError("a fault of ours")

    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(1, SlabReader([file], pool.view, "buffered", preadv=broken), pool)
        queue.submit(slabs(pool)[:1])
        with pytest.raises(AssertionError, match="a fault of ours"):
            collect(queue, 1)


def test_signals_do_not_disturb_a_read(model: Path) -> None:
    n_signals = 0

    def count(number: int, frame: object) -> None:
        nonlocal n_signals
        n_signals += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
            queue = ReadQueue(0, SlabReader([file], pool.view, "direct"), pool)
            generation = 0
            while n_signals < 50:
                generation += 1
                queue.submit(slabs(pool, generation))
                assert all(isinstance(a, SlabsReady) for a in collect(queue, N_SLOTS))
                for read in slabs(pool, generation):
                    assert_right(pool, read)
            assert queue.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_close_does_not_wait_for_a_disk_that_hangs(model: Path) -> None:
    is_stuck, may_go_on = threading.Event(), threading.Event()

    def stuck(fd: int, buffers: list[memoryview], offset: int) -> int:
        is_stuck.set()
        may_go_on.wait(20)
        return os.preadv(fd, buffers, offset)

    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(1, SlabReader([file], pool.view, "buffered", preadv=stuck), pool)
        queue.submit(slabs(pool))
        assert is_stuck.wait(20)
        before = time.monotonic()
        assert not queue.close(0.1)
        assert time.monotonic() - before < 5
        may_go_on.set()


def test_the_pool_can_be_unmapped_after_failures(model: Path) -> None:
    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        file = strict_direct(file)
        preadv = FaultyPreadv(file.direct_fd, Fault("EIO", 1, lasting=True))
        queue = ReadQueue(2, SlabReader([file], pool.view, "direct", preadv=preadv), pool)
        queue.submit(slabs(pool))
        assert all(isinstance(answer, ReadFailed) for answer in collect(queue, N_SLOTS))
        assert queue.close()
        pool.close()


def test_compute_is_told_by_the_thread_that_read_the_last_byte(model: Path) -> None:
    """And a slot may be read into again from then on, though nobody collected the first read."""
    notice_fd, tell_fd = notice_pipe()
    with opened(model) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, _):
        queue = ReadQueue(2, SlabReader([file], pool.view, "buffered"), pool, tell_fd)
        reads = slabs(pool)
        queue.submit(reads)
        noticed = []
        while len(noticed) < N_SLOTS:
            select.select([notice_fd], [], [], 20)
            noticed += [notice.lease for notice in take_notices(notice_fd)]
        again = [
            read._replace(lease=SlotLease(read.lease.slot, read.lease.generation + 1))
            for read in reads
        ]
        queue.submit(again)
        answers = collect(queue, 2 * N_SLOTS)
        assert all(isinstance(answer, SlabsReady) and answer.noticed for answer in answers)
        assert sorted(noticed, key=lambda lease: lease.slot) == [read.lease for read in reads]
        assert queue.close()
    os.close(notice_fd)
    os.close(tell_fd)
