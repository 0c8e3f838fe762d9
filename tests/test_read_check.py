import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_worker.read_check import check_cached_read, check_read, slot_windows
from io_worker.reader import ReadError
from shm.codec import MAX_INTEGER
from shm.messages import ReadRange, SlabRead, SlotLease
from shm.pool import ALIGNMENT, HEADER, PoolLayout, SlotClass, align_up, window_bytes

FILES = (1_000_000, 50_000)
RANGE_BYTES = 10_000
WINDOW = window_bytes(RANGE_BYTES)
LAYOUT = PoolLayout((SlotClass(2, (WINDOW,) * 3), SlotClass(3, (WINDOW, WINDOW, 2 * WINDOW))))
WINDOWS = slot_windows(LAYOUT)
LAST = LAYOUT.n_slots - 1


def read_of(slot: int, file_offset: int = 12_345) -> SlabRead:
    head = file_offset % ALIGNMENT
    ranges = tuple(
        ReadRange(0, file_offset, RANGE_BYTES, start + head) for start, _ in WINDOWS[slot]
    )
    return SlabRead(SlotLease(slot, 5), 1, 2, ranges)


def with_range(read: SlabRead, index: int, **changes: int) -> SlabRead:
    ranges = list(read.ranges)
    ranges[index] = ranges[index]._replace(**changes)
    return read._replace(ranges=tuple(ranges))


@pytest.mark.parametrize("slot", range(LAYOUT.n_slots))
@pytest.mark.parametrize("file_offset", [0, 1, 4095, 4096, FILES[0] - RANGE_BYTES])
def test_a_good_read_goes_to_the_windows_of_its_slot(slot: int, file_offset: int) -> None:
    assert check_read(read_of(slot, file_offset), WINDOWS, FILES) == WINDOWS[slot]


def test_the_one_range_of_a_packed_file_may_fill_the_slot() -> None:
    start, stop = WINDOWS[LAST][0][0], WINDOWS[LAST][2][1]
    read = SlabRead(SlotLease(LAST, 1), 0, 0, (ReadRange(0, 4096, stop - start, start),))
    assert check_read(read, WINDOWS, FILES) == ((start, stop),)
    too_long = read._replace(ranges=(ReadRange(0, 4097, stop - start, start + 1),))
    with pytest.raises(ReadError, match="fits a window"):
        check_read(too_long, WINDOWS, FILES)


def moved(read: SlabRead, index: int, file_offset: int) -> SlabRead:
    """The range from another place of the file, with the pool offset that belongs to it."""
    window = WINDOWS[read.lease.slot][index][0]
    return with_range(
        read, index, file_offset=file_offset, pool_offset=window + file_offset % ALIGNMENT
    )


GOOD = read_of(1)
POOL_OFFSET = GOOD.ranges[0].pool_offset
BAD = {
    "slot one too high": (GOOD._replace(lease=SlotLease(LAYOUT.n_slots, 5)), "a slot below 5"),
    "slot 2^63-1": (GOOD._replace(lease=SlotLease(MAX_INTEGER, 5)), "a slot below 5"),
    "layer over u32": (GOOD._replace(layer=2**32), "layer and expert of at most"),
    "expert over u32": (GOOD._replace(expert=2**32), "layer and expert of at most"),
    "no range": (GOOD._replace(ranges=()), "3 ranges or 1, found 0"),
    "two ranges": (GOOD._replace(ranges=GOOD.ranges[:2]), "3 ranges or 1, found 2"),
    "four ranges": (GOOD._replace(ranges=GOOD.ranges + GOOD.ranges[:1]), "found 4"),
    "file that is not there": (with_range(GOOD, 0, file=2), "a file below 2, found 2"),
    "zero bytes": (with_range(GOOD, 1, n_bytes=0), "at least 1 byte"),
    "offset at the end": (moved(GOOD, 2, FILES[0]), "within 1000000 bytes"),
    "one byte past the end": (moved(GOOD, 2, FILES[0] - RANGE_BYTES + 1), "within 1000000 bytes"),
    "the end of the other file": (with_range(GOOD, 0, file=1, n_bytes=40_000), "within 50000"),
    "offset 2^63-1": (moved(GOOD, 2, MAX_INTEGER), "within 1000000 bytes"),
    "longer than the window": (with_range(GOOD, 0, n_bytes=WINDOW), "fits a window"),
    "length 2^63-1": (with_range(GOOD, 0, n_bytes=MAX_INTEGER), "within 1000000 bytes"),
    "one byte further": (with_range(GOOD, 0, pool_offset=POOL_OFFSET + 1), "pool byte"),
    "one page further": (with_range(GOOD, 0, pool_offset=POOL_OFFSET + ALIGNMENT), "pool byte"),
    "another window": (
        with_range(GOOD, 0, pool_offset=GOOD.ranges[1].pool_offset),
        "pool byte",
    ),
    "another slot": (
        with_range(GOOD, 0, pool_offset=read_of(2).ranges[0].pool_offset),
        "pool byte",
    ),
    "the header array": (with_range(GOOD, 0, pool_offset=12_345 % ALIGNMENT), "pool byte"),
    "pool offset 2^63-1": (with_range(GOOD, 0, pool_offset=MAX_INTEGER), "pool byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_figure_is_refused(case: str) -> None:
    read, words = BAD[case]
    with pytest.raises(ReadError, match=f"refused: expected .*{words}") as caught:
        check_read(read, WINDOWS, FILES)
    assert not caught.value.model_changed


def test_without_a_pool_only_file_and_range_count() -> None:
    """Every layer and expert has a number; what would be a slot may be any."""
    read = with_range(GOOD, 0, pool_offset=0)._replace(lease=SlotLease(MAX_INTEGER, 0))
    check_cached_read(read, FILES)
    for case in ("file that is not there", "zero bytes", "offset at the end"):
        with pytest.raises(ReadError, match=BAD[case][1]):
            check_cached_read(BAD[case][0], FILES)


FIGURE = st.one_of(
    st.integers(0, 5), st.integers(0, 2 * LAYOUT.total_bytes), st.integers(0, MAX_INTEGER)
)
RANGE = st.builds(ReadRange, st.integers(0, 2), FIGURE, FIGURE, FIGURE)
READ = st.builds(
    SlabRead,
    st.builds(SlotLease, st.integers(0, 8), FIGURE),
    FIGURE,
    FIGURE,
    st.lists(RANGE, max_size=4).map(tuple),
)


@given(READ)
def test_what_is_accepted_stays_inside_its_slot(read: SlabRead) -> None:
    try:
        check_read(read, WINDOWS, FILES)
    except ReadError:
        return
    start, stop = WINDOWS[read.lease.slot][0][0], WINDOWS[read.lease.slot][2][1]
    assert start >= LAYOUT.n_slots * HEADER.size and stop <= LAYOUT.total_bytes
    for wanted in read.ranges:
        head = wanted.file_offset % ALIGNMENT
        assert start <= wanted.pool_offset - head
        assert wanted.pool_offset - head + align_up(head + wanted.n_bytes) <= stop
