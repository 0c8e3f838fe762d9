"""The memory of the pool's slots: given back to the system, and taken again.

A slot that is out of use has none. One whose content compute has in memory of its own has none for
now, and counts as if it had: its content is somewhere, or will be read into it again.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator

from shm.huge_pages import HUGE_PAGE_BYTES, make_huge_again
from shm.pool import PoolLayout, allocated_bytes, punch_hole

# a slot shares its first and last huge page with neighbours, and a read into one of these takes
# about as long; what is still held after all tries is counted like any other memory
N_TRIES, TRY_SECONDS = 8, 0.001


class PoolMemory:
    """The pool's memfd by slots. The descriptor stays the caller's."""

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        self._fd = fd
        self._file_bytes = layout.total_bytes
        self._without: set[int] = set()  # slots that had to give back their memory
        self._starts = [gate for gate, _, _ in layout.windows_of_slots()]
        self._slot_bytes = [layout.classes[index].slot_bytes for index in layout.class_of_slots()]
        self.usable_bytes = layout.total_bytes  # of all but the slots that are out of use

    @property
    def n_bytes(self) -> int:
        """Memory that the pool holds now."""
        return allocated_bytes(self._fd)

    def punch(self, slots: Collection[int]) -> None:
        """Give back the memory of slots that go out of use. Raises `OSError`."""
        self.vacate(slots)
        self.usable_bytes -= sum(self._slot_bytes[slot] for slot in slots)

    def vacate(self, slots: Collection[int]) -> None:
        """Give back the memory of slots whose content is elsewhere now; the next read into one
        takes it again. Raises `OSError`."""
        self._without.update(slots)
        for start, n_bytes in self._ranges(slots):
            for _ in range(N_TRIES):
                if punch_hole(self._fd, start, n_bytes):
                    break
                time.sleep(TRY_SECONDS)

    def restore(self, slots: Collection[int]) -> None:
        """Put slots back to use and take their memory again, now: what is only promised would look
        like room for more."""
        self.usable_bytes += sum(self._slot_bytes[slot] for slot in slots)
        for start, n_bytes in self._ranges(slots):
            with contextlib.suppress(OSError):  # a read into the slot takes it, or says why not
                os.posix_fallocate(self._fd, start, n_bytes)
        # it comes in small pages
        self._without.difference_update(slots)
        pages = self._huge_pages(slots) - self._huge_pages(self._without)
        make_huge_again(self._fd, self._file_bytes, sorted(pages))

    def _huge_pages(self, slots: Collection[int]) -> set[int]:
        """Those that slots lie in, if only in part."""
        found: set[int] = set()
        for start, n_bytes in self._ranges(slots):
            stop = -(-(start + n_bytes) // HUGE_PAGE_BYTES)
            found.update(range(start // HUGE_PAGE_BYTES, stop))
        return found

    def _ranges(self, slots: Collection[int]) -> Iterator[tuple[int, int]]:
        """Neighbours in one range: (start, bytes)."""
        start = stop = 0
        for slot in sorted(slots):
            if self._starts[slot] != stop:
                if stop > start:
                    yield start, stop - start
                start = self._starts[slot]
            stop = self._starts[slot] + self._slot_bytes[slot]
        if stop > start:
            yield start, stop - start
