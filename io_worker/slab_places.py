"""Where slabs go: into slots of the pool, or nowhere but the page cache.

`ReadQueue` asks a place whether a read is legal, prepares each window before the first byte comes,
and says when the last one is there. Several threads prepare and finish at once.
"""

from collections.abc import Iterable, Sequence

from io_worker.read_check import Window, check_cached_read, check_read, slot_windows
from io_worker.reader import ReadError
from shm.messages import SlabRead
from shm.pool import PoolMapping


class PoolSlots:
    """Slots of the pool. The header of a slot is written after the last byte of its slab."""

    def __init__(self, pool: PoolMapping, file_sizes_bytes: Sequence[int]) -> None:
        self._pool = pool
        self._windows = slot_windows(pool.layout)
        self._file_sizes_bytes = file_sizes_bytes
        self._populated: set[int] = set()  # starts of windows whose page table entries exist

    def check(self, read: SlabRead) -> tuple[Window, ...]:
        """The windows that the ranges go to; raises `ReadError` if anything does not fit."""
        return check_read(read, self._windows, self._file_sizes_bytes)

    def prepare(self, window: Window) -> None:
        """Page table entries of a window at its first use: cheaper in one call than by faults."""
        start, stop = window
        if start in self._populated:
            return
        self._populated.add(start)
        try:
            self._pool.populate_range(start, stop - start)
        except OSError as error:
            text = f"pool bytes {start} to {stop}: no memory ({error.strerror})"
            raise ReadError(error.errno or 0, text) from error

    def forget(self, slots: Iterable[int]) -> None:
        """The memory of these slots is gone, their page table entries with it."""
        for slot in slots:
            self._populated.difference_update(start for start, _ in self._windows[slot])

    def finish(self, read: SlabRead, n_bytes: int) -> None:
        """The slab is there, all of it."""
        slot, generation = read.lease.slot, read.lease.generation
        self._pool.write_header(slot, generation, read.layer, read.expert, n_bytes)


class PageCache:
    """The kernel's own cache: nothing to prepare, nothing to note."""

    def __init__(self, file_sizes_bytes: Sequence[int]) -> None:
        self._file_sizes_bytes = file_sizes_bytes

    def check(self, read: SlabRead) -> tuple[Window, ...]:
        """See `PoolSlots`; the windows are empty."""
        check_cached_read(read, self._file_sizes_bytes)
        return ((0, 0),) * len(read.ranges)

    def prepare(self, window: Window) -> None:
        """See `PoolSlots`."""

    def forget(self, slots: Iterable[int]) -> None:
        """See `PoolSlots`."""

    def finish(self, read: SlabRead, n_bytes: int) -> None:
        """See `PoolSlots`."""
