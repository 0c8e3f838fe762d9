"""The pool's layout, and what a process may do to it."""

import ctypes
import errno
import mmap
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shm.pool import (
    ALIGNMENT,
    HEADER,
    PoolError,
    PoolLayout,
    PoolMapping,
    SlotClass,
    align_up,
    allocated_bytes,
    create_pool,
    punch_hole,
    read_only,
    window_bytes,
)

LAYOUT = PoolLayout((SlotClass(3, (4096, 8192, 4096)), SlotClass(2, (8192, 8192, 16384))))


@pytest.fixture
def pool_fd():
    fd = create_pool(LAYOUT)
    yield fd
    os.close(fd)


def test_sizes() -> None:
    assert [align_up(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert HEADER.size == 32
    assert LAYOUT.n_slots == 5
    assert LAYOUT.header_bytes == 4096
    assert LAYOUT.total_bytes == 4096 + 3 * 16384 + 2 * 32768
    assert LAYOUT.class_of_slots() == [0, 0, 0, 1, 1]
    assert PoolLayout((SlotClass(200, (4096,) * 3),)).header_bytes == 8192


def test_a_window_holds_a_range_at_any_offset() -> None:
    rng = random.Random(1)
    sizes = [1, 2, 4095, 4096, 4097, 8192, *(rng.randint(1, 50_000) for _ in range(50))]
    for n_bytes in sizes:
        needed = [align_up(head + n_bytes) for head in (0, 1, 31, 32, 4064, 4095)]
        assert max(needed) <= window_bytes(n_bytes) < max(needed) + 2 * ALIGNMENT
        assert window_bytes(n_bytes) % ALIGNMENT == 0


def test_windows_fill_the_pool_without_gap_or_overlap() -> None:
    position = LAYOUT.header_bytes
    classes = LAYOUT.class_of_slots()
    for number, (gate, up, down) in enumerate(LAYOUT.windows_of_slots()):
        sizes = LAYOUT.classes[classes[number]].windows
        assert (gate, up, down) == (position, position + sizes[0], position + sum(sizes[:2]))
        position += sum(sizes)
    assert position == LAYOUT.total_bytes


def test_the_pool_is_allocated_and_sealed(pool_fd: int) -> None:
    assert allocated_bytes(pool_fd) == LAYOUT.total_bytes
    for n_bytes in (0, LAYOUT.total_bytes - 1, LAYOUT.total_bytes + 1):
        with pytest.raises(OSError) as caught:
            os.ftruncate(pool_fd, n_bytes)
        assert caught.value.errno == errno.EPERM


def test_headers_are_seen_by_another_mapping(pool_fd: int) -> None:
    other = read_only(pool_fd)
    writer = PoolMapping(pool_fd, LAYOUT, writable=True)
    reader = PoolMapping(other, LAYOUT, writable=False)
    assert not reader.holds(4, 9, 2, 3)
    writer.write_header(4, 9, 2, 3, 100)
    assert reader.holds(4, 9, 2, 3)
    for wrong in ((3, 9, 2, 3), (4, 8, 2, 3), (4, 9, 1, 3), (4, 9, 2, 4)):
        assert not reader.holds(*wrong)
    writer.write_header(4, 2**64 - 1, 2**32 - 1, 2**32 - 1, 2**64 - 1)
    assert reader.holds(4, 2**64 - 1, 2**32 - 1, 2**32 - 1)
    for mapping in (writer, reader):
        mapping.close()
    os.close(other)


def test_a_reader_cannot_write(pool_fd: int) -> None:
    other = read_only(pool_fd)
    with pytest.raises(PermissionError):
        mmap.mmap(other, LAYOUT.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PoolError, match="cannot map"):
        PoolMapping(other, LAYOUT, writable=True)
    with pytest.raises(OSError):
        os.pwrite(other, b"x", 0)
    mapping = PoolMapping(other, LAYOUT, writable=False)
    with pytest.raises(TypeError):
        mapping.view[0] = 1
    with Path("/dev/zero").open("rb") as zero, pytest.raises(BufferError):
        os.preadv(zero.fileno(), [mapping.view], 0)
    mapping.populate(writable=False)
    mapping.close()
    os.close(other)


def test_populating_keeps_the_bytes(pool_fd: int) -> None:
    mapping = PoolMapping(pool_fd, LAYOUT, writable=True)
    mapping.view[8192:8196] = b"abcd"
    mapping.populate(writable=True)
    mapping.populate_range(4096, 8192)
    assert bytes(mapping.view[8192:8196]) == b"abcd"
    mapping.close()


def resident_bytes(mapping: PoolMapping) -> int:
    """Of the pool, in the page tables of this process."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping.view))
    start, n_pages = address // mmap.PAGESIZE, len(mapping.view) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(start * 8)
        entries = struct.unpack(f"={n_pages}Q", file.read(n_pages * 8))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


@pytest.mark.parametrize("punched", [(), ((4096, 16384),), ((0, 4096), (53248, 65536))])
def test_what_was_given_back_stays_there_when_the_rest_is_populated(
    pool_fd: int, punched: tuple[tuple[int, int], ...]
) -> None:
    first = PoolMapping(pool_fd, LAYOUT, writable=True)
    first.populate(writable=True)  # a new pool: nothing in it was ever written
    assert resident_bytes(first) == LAYOUT.total_bytes
    first.close()
    for start, n_bytes in punched:
        punch_hole(pool_fd, start, n_bytes)
    held_bytes = LAYOUT.total_bytes - sum(n_bytes for _, n_bytes in punched)
    second = PoolMapping(pool_fd, LAYOUT, writable=True)
    assert second.is_whole is not bool(punched)
    second.populate(writable=False)
    assert allocated_bytes(pool_fd) == held_bytes
    assert resident_bytes(second) == held_bytes
    second.close()


def test_a_hole_gives_memory_back_and_reads_as_zero(pool_fd: int) -> None:
    mapping = PoolMapping(pool_fd, LAYOUT, writable=True)
    mapping.view[4096:4100] = b"abcd"
    punch_hole(pool_fd, 4096, 16384)
    assert allocated_bytes(pool_fd) == LAYOUT.total_bytes - 16384
    assert os.fstat(pool_fd).st_size == LAYOUT.total_bytes
    assert bytes(mapping.view[4096:4100]) == bytes(4)
    mapping.view[4096:4100] = b"efgh"
    assert bytes(mapping.view[4096:4100]) == b"efgh"
    mapping.close()
    with pytest.raises(OSError, match="cannot punch a hole"):
        punch_hole(pool_fd, 0, 0)


LIMITED = """
import resource, sys
from shm.pool import *
limit, n_bytes = int(sys.argv[2]), int(sys.argv[3])
layout = PoolLayout((SlotClass(1, (n_bytes, 4096, 4096)),))
if sys.argv[1] == "as":
    fd = create_pool(layout)
resource.setrlimit(getattr(resource, "RLIMIT_" + sys.argv[1].upper()), (limit, limit))
try:
    if sys.argv[1] == "as":
        PoolMapping(fd, layout, writable=True)
    else:
        create_pool(layout)
except PoolError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "value", "n_bytes", "expected"),
    [
        ("fsize", 1 << 16, 1 << 20, "RLIMIT_FSIZE is smaller"),
        ("as", 1, 64 << 20, "cannot map 67121152 bytes"),
    ],
)
def test_a_limit_is_one_line(limit: str, value: int, n_bytes: int, expected: str) -> None:
    """In a process of its own: limits cannot be raised again."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, limit, str(value), str(n_bytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("pool: ")
    assert expected in line
