"""The memory of the pool's slots: given back to the system, and taken again."""

import contextlib
import os
from collections.abc import Iterable, Iterator

from shm.pool import PoolLayout, allocated_bytes, punch_hole


class PoolMemory:
    """The pool's memfd by slots. The descriptor stays the caller's."""

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        self._fd = fd
        self._starts = [gate for gate, _, _ in layout.windows_of_slots()]
        self._slot_bytes = [layout.classes[index].slot_bytes for index in layout.class_of_slots()]

    @property
    def n_bytes(self) -> int:
        """Memory that the pool holds now."""
        return allocated_bytes(self._fd)

    def punch(self, slots: Iterable[int]) -> None:
        """Give back the memory of slots that nobody uses. Raises `OSError`."""
        for start, n_bytes in self._ranges(slots):
            punch_hole(self._fd, start, n_bytes)

    def restore(self, slots: Iterable[int]) -> None:
        """Take it again, now: what is only promised would look like room for more."""
        for start, n_bytes in self._ranges(slots):
            with contextlib.suppress(OSError):  # a read into the slot takes it, or says why not
                os.posix_fallocate(self._fd, start, n_bytes)

    def _ranges(self, slots: Iterable[int]) -> Iterator[tuple[int, int]]:
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
