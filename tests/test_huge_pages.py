"""Shared memory in huge pages, as far as the system has them, and what may be done with it."""

import ctypes
import gc
import itertools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.processes.pool_memory import PoolMemory
from shm.huge_pages import (
    HUGE_PAGE_BYTES,
    fill_with_huge_pages,
    map_shared,
    pool_like_buffer,
)
from shm.pool import PoolLayout, PoolMapping, SlotClass, allocated_bytes, create_pool, punch_hole

BOTH = mmap.PROT_READ | mmap.PROT_WRITE
KIB = 1024
# slots that begin and end within huge pages, and an end that is no whole one
LAYOUT = PoolLayout((SlotClass(8, (400 * KIB, 400 * KIB, 412 * KIB)),))


def huge_bytes(fd: int) -> int:
    """Bytes of this pool that this process has mapped as huge pages."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    inode = str(os.fstat(fd).st_ino)  # the fifth word of the first line
    pools = [part for part in parts if part and part.split(maxsplit=5)[4] == inode]
    return sum(
        int(re.findall(r"^ShmemPmdMapped: +(\d+) kB", part, re.M)[0]) * KIB for part in pools
    )


def address_space_bytes() -> int:
    """Of this process, all that is mapped or reserved."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def small_memfd(n_bytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, n_bytes)
    return fd


@pytest.mark.parametrize("n_bytes", [4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 4096])
def test_a_file_is_mapped_from_a_boundary_on_and_shared(n_bytes: int) -> None:
    fd = small_memfd(n_bytes)
    mapping, start = map_shared(fd, n_bytes, BOTH)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))
    assert address % HUGE_PAGE_BYTES == 0
    mapping[start + n_bytes - 1] = 7
    assert os.pread(fd, 1, n_bytes - 1) == b"\7"
    mapping.close()
    os.close(fd)


def test_what_cannot_be_mapped_is_an_error_that_leaves_nothing() -> None:
    before, n_bytes = address_space_bytes(), 1 << 30  # more than anything else maps meanwhile
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError):
        map_shared(fd, n_bytes, mmap.PROT_READ)
    os.close(fd)
    assert address_space_bytes() < before + n_bytes // 2


@pytest.mark.parametrize("n_bytes", [4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 4096])
def test_filling_takes_whole_huge_pages_at_most_and_leaves_zeros(n_bytes: int) -> None:
    fd = small_memfd(n_bytes)
    fill_with_huge_pages(fd, n_bytes)
    assert allocated_bytes(fd) <= n_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    assert os.pread(fd, n_bytes, 0) == bytes(n_bytes)
    os.close(fd)


def test_filling_what_cannot_be_written_does_nothing() -> None:
    fd = small_memfd(HUGE_PAGE_BYTES)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    fill_with_huge_pages(reader, HUGE_PAGE_BYTES)
    assert allocated_bytes(fd) == 0
    os.close(reader)
    os.close(fd)


@pytest.fixture
def pool() -> Iterator[tuple[PoolMapping, int]]:
    """A pool and its descriptor, on a system that makes huge pages of it."""
    fd = create_pool(LAYOUT)
    pool = PoolMapping(fd, LAYOUT, writable=True)
    pool.populate(writable=True)
    if huge_bytes(fd) == 0:
        pytest.skip("needs huge pages of a memfd (Linux 6.1), and some that are free")
    yield pool, fd
    pool.close()
    os.close(fd)


def test_every_mapping_of_a_pool_has_huge_pages(pool: tuple[PoolMapping, int]) -> None:
    _, fd = pool
    whole = LAYOUT.total_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    assert huge_bytes(fd) == whole
    second = PoolMapping(fd, LAYOUT, writable=False)
    second.populate(writable=False)
    assert huge_bytes(fd) == 2 * whole
    second.close()
    assert allocated_bytes(fd) == LAYOUT.total_bytes


def test_a_slot_within_huge_pages_is_given_back_alone(pool: tuple[PoolMapping, int]) -> None:
    mapping, fd = pool
    starts = [gate for gate, _, _ in mapping.windows] + [LAYOUT.total_bytes]
    for slot, (start, stop) in enumerate(itertools.pairwise(starts)):
        mapping.view[start:stop] = bytes([slot + 1]) * (stop - start)
    n_left = LAYOUT.total_bytes
    for slot in (3, 0, 7, 4):
        n_bytes = starts[slot + 1] - starts[slot]
        punch_hole(fd, starts[slot], n_bytes)
        n_left -= n_bytes
        assert allocated_bytes(fd) == n_left
    for slot, (start, stop) in enumerate(itertools.pairwise(starts)):
        expected = 0 if slot in (3, 0, 7, 4) else slot + 1
        assert mapping.view[start:stop] == bytes([expected]) * (stop - start)


def test_slots_that_come_back_are_in_huge_pages_as_before(pool: tuple[PoolMapping, int]) -> None:
    mapping, fd = pool
    before = huge_bytes(fd)
    starts = [gate for gate, _, _ in mapping.windows] + [LAYOUT.total_bytes]
    for slot, (start, stop) in enumerate(itertools.pairwise(starts)):
        mapping.view[start:stop] = bytes([slot + 1]) * (stop - start)
    memory = PoolMemory(fd, LAYOUT)
    gone = (3, 0, 7, 4)
    memory.punch(gone)
    assert huge_bytes(fd) < before
    for slot in gone:
        memory.restore((slot,))
    mapping.populate(writable=True)
    assert huge_bytes(fd) == before
    assert allocated_bytes(fd) == LAYOUT.total_bytes
    for slot, (start, stop) in enumerate(itertools.pairwise(starts)):
        expected = 0 if slot in gone else slot + 1
        assert mapping.view[start:stop] == bytes([expected]) * (stop - start)


def test_no_memory_is_taken_for_what_is_still_a_hole(pool: tuple[PoolMapping, int]) -> None:
    mapping, fd = pool
    (start, _, _), (stop, _, _) = mapping.windows[3:5]
    memory = PoolMemory(fd, LAYOUT)
    memory.punch((3, 4))
    memory.restore((4,))
    assert allocated_bytes(fd) == LAYOUT.total_bytes - (stop - start)


def test_a_hole_beside_pages_in_use_is_punched_again_later(pool: tuple[PoolMapping, int]) -> None:
    """Pages in a pipe are held by the system, like those of a direct read."""
    mapping, fd = pool
    (start, _, _), (stop, _, _) = mapping.windows[3:5]
    mapping.view[start:stop] = b"x" * (stop - start)
    read_end, write_end = os.pipe()
    with mapping.view[stop : stop + 4096] as neighbour:
        put_into_pipe(write_end, neighbour)
        assert not punch_hole(fd, start, stop - start)
        assert mapping.view[start:stop] == bytes(stop - start)
        before = allocated_bytes(fd)
        assert len(os.read(read_end, 4096)) == 4096
    assert punch_hole(fd, start, stop - start)
    assert LAYOUT.total_bytes - (stop - start) == allocated_bytes(fd) < before
    os.close(read_end)
    os.close(write_end)


def put_into_pipe(write_end: int, view: memoryview) -> None:
    """The pages themselves, by vmsplice(2)."""
    part = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
    assert ctypes.CDLL(None).vmsplice(write_end, part, 1, 0) == len(view)


@pytest.mark.parametrize("n_bytes", [1, 4096, (2 << 20) + 4096])
def test_a_buffer_like_the_pool_takes_what_is_read_into_it(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "file").write_bytes(bytes([7]) * n_bytes)
    gc.collect()  # what earlier tests left is not closed in between
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with pool_like_buffer(n_bytes) as buffer, (tmp_path / "file").open("rb", buffering=0) as file:
        assert len(buffer) == n_bytes
        assert os.preadv(file.fileno(), [buffer], 0) == n_bytes
        assert bytes(buffer) == bytes([7]) * n_bytes
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open
