"""Memory of slots, given back and taken again, seen by a process that has the pool mapped."""

import os

import pytest

from coordinator.core.slot_classes import slots_within, smallest_layout_bytes
from coordinator.processes.pool_memory import PoolMemory
from shm.pool import PoolLayout, PoolMapping, SlotClass, create_pool

LAYOUT = PoolLayout((SlotClass(4, (4096, 4096, 8192)), SlotClass(3, (8192, 8192, 8192))))


@pytest.mark.parametrize(
    ("slots", "n_bytes"),
    [([0], 16384), ([1, 2], 32768), ([3, 4], 16384 + 24576), ([6, 0, 2], 24576 + 2 * 16384)],
)
def test_what_is_punched_is_gone_and_comes_back(slots: list[int], n_bytes: int) -> None:
    fd = create_pool(LAYOUT)
    memory = PoolMemory(fd, LAYOUT)
    pool = PoolMapping(fd, LAYOUT, writable=True)
    starts = [window[0] for window in pool.windows]
    for slot, start in enumerate(starts):
        pool.view[start] = slot + 1
    assert memory.n_bytes == LAYOUT.total_bytes
    memory.punch(slots)
    assert memory.n_bytes == LAYOUT.total_bytes - n_bytes
    found = [pool.view[start] for start in starts]
    assert found == [0 if slot in slots else slot + 1 for slot in range(7)]
    memory.punch(slots)  # reading a hole gave it a page; punched again it has none
    memory.restore(slots)
    assert memory.n_bytes == LAYOUT.total_bytes
    pool.close()
    os.close(fd)


def test_a_smaller_pool_keeps_the_same_share_of_every_class() -> None:
    layout = PoolLayout((SlotClass(40, (4096, 4096, 4096)), SlotClass(20, (8192, 8192, 8192))))
    assert slots_within(layout, layout.total_bytes) == (40, 20)
    assert slots_within(layout, layout.header_bytes + 480 * 1024) == (20, 10)
    assert slots_within(layout, layout.header_bytes + 479 * 1024) == (19, 9)
    assert slots_within(layout, 0) == (2, 2)
    assert smallest_layout_bytes(layout) == layout.header_bytes + 2 * 12288 + 2 * 24576
    tiny = PoolLayout((SlotClass(1, (4096, 4096, 4096)),))
    assert slots_within(tiny, 0) == (1,)


def test_a_vacated_slot_counts_as_if_it_had_memory() -> None:
    """What it held is with compute: nothing of the limit came free."""
    fd = create_pool(LAYOUT)
    memory = PoolMemory(fd, LAYOUT)
    memory.vacate((0, 1))
    assert memory.n_bytes == LAYOUT.total_bytes - 2 * 16384
    assert memory.usable_bytes == LAYOUT.total_bytes
    memory.punch((0, 4))
    assert memory.n_bytes == LAYOUT.total_bytes - 2 * 16384 - 24576
    assert memory.usable_bytes == LAYOUT.total_bytes - 16384 - 24576
    memory.restore((4,))
    assert memory.usable_bytes == LAYOUT.total_bytes - 16384
    os.close(fd)
