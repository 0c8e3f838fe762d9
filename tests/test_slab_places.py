"""Windows of the pool are set up for writing once, and again after their memory was given back."""

import os
import re
from pathlib import Path

from io_worker.slab_places import PoolSlots
from shm.pool import PoolLayout, PoolMapping, SlotClass, create_pool, punch_hole


def mapped_kib(fd: int) -> int:
    """Pages of a pool that this process has page table entries for."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    inode = str(os.fstat(fd).st_ino)  # the fifth word of the first line
    pools = [part for part in parts if part and part.split(maxsplit=5)[4] == inode]
    return sum(int(re.findall(r"^Rss: +(\d+) kB", part, re.M)[0]) for part in pools)


def test_a_window_is_populated_at_its_first_use_and_after_a_punch() -> None:
    layout = PoolLayout((SlotClass(3, (40960, 40960, 45056)),))
    fd = create_pool(layout)
    pool = PoolMapping(fd, layout, writable=True)
    place = PoolSlots(pool, [10**9])
    gate, up, down = pool.windows[1]
    stop, _, _ = pool.windows[2]
    windows = [(gate, up), (up, down), (down, stop)]

    def prepared_kib() -> int:
        for window in windows:
            place.prepare(window)
        return mapped_kib(fd)

    assert mapped_kib(fd) == 0
    slot_kib = (stop - gate) // 1024
    assert prepared_kib() == slot_kib
    punch_hole(fd, gate, stop - gate)
    assert mapped_kib(fd) == 0
    assert prepared_kib() == 0, "it thinks that they are there"
    place.forget([1])
    assert prepared_kib() == slot_kib
    pool.close()
    os.close(fd)
