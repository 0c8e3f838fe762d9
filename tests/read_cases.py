"""Files, pools and faults for the tests of reading. No test by itself."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from io_worker.reader import ModelFile, close_files, open_files
from shm.messages import ReadRange, SlabRead, SlotLease
from shm.pool import ALIGNMENT, PoolLayout, PoolMapping, SlotClass, create_pool, window_bytes

GUARD = 0xA5


def pattern(n_bytes: int) -> bytes:
    """Bytes of which no two aligned units are equal."""
    words = -(-n_bytes // 8)
    return b"".join((i * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") for i in range(words))[
        :n_bytes
    ]


def write_file(path: Path, data: bytes) -> Path:
    """A file that was last written a minute ago: the next write changes its time for certain."""
    path.write_bytes(data)
    before = time.time_ns() - 60 * 10**9
    os.utime(path, ns=(before, before))
    return path


@contextmanager
def opened(path: Path) -> Iterator[ModelFile]:
    """One model file; closed afterwards."""
    files = open_files([path])
    try:
        yield files[0]
    finally:
        close_files(files)


@contextmanager
def pool_of(n_slots: int, *range_bytes: int) -> Iterator[tuple[PoolMapping, int]]:
    """A pool of slots with room for these three ranges, filled with the guard byte, and its fd."""
    gate, up, down = (window_bytes(n_bytes) for n_bytes in range_bytes)
    layout = PoolLayout((SlotClass(n_slots, (gate, up, down)),))
    fd = create_pool(layout)
    pool = PoolMapping(fd, layout, writable=True)
    pool.view[:] = bytes([GUARD]) * layout.total_bytes
    try:
        yield pool, fd
    finally:
        os.close(fd)  # not the mapping: exceptions that a test keeps hold views of it


def range_at(window: int, file_offset: int, n_bytes: int) -> ReadRange:
    """A range of file 0 as the coordinator would order it into the window that starts there."""
    return ReadRange(0, file_offset, n_bytes, window + file_offset % ALIGNMENT)


def slab_at(
    pool: PoolMapping, slot: int, offsets: tuple[int, int, int], n_bytes: int, generation: int = 1
) -> SlabRead:
    """A read of three equal ranges into one slot; layer 3, the slot's number as expert."""
    ranges = tuple(
        range_at(window, offset, n_bytes)
        for window, offset in zip(pool.windows[slot], offsets, strict=True)
    )
    return SlabRead(SlotLease(slot, generation), 3, slot, ranges)


def content(pool: PoolMapping, wanted: ReadRange) -> bytes:
    """What lies in the pool where the range should have gone."""
    return bytes(pool.view[wanted.pool_offset : wanted.pool_offset + wanted.n_bytes])


def strict_direct(file: ModelFile) -> ModelFile:
    """The file with a descriptor that `FaultyPreadv` treats as direct, whatever the file system."""
    if file.direct_fd is not None:
        os.close(file.direct_fd)
    return replace(file, direct_fd=os.dup(file.fd), direct_refusal="")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at call `first` and, if `lasting`, at every later call of that descriptor."""

    kind: str  # "EIO", "EINVAL", …, "half", "one byte", "nothing"
    first: int
    lasting: bool = False


class FaultyPreadv:
    """`os.preadv` with the rules of O_DIRECT on one descriptor and one fault. Counts the calls.

    It knows no flags, like an old kernel.
    """

    def __init__(self, direct_fd: int | None, fault: Fault | None = None) -> None:
        self.n_calls = 0
        self.n_refused = 0  # for their flags
        self._direct_fd = direct_fd
        self._fault = fault
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            self.n_refused += 1
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        with self._lock:
            self.n_calls += 1
            fault = self._fault
            strikes = fault is not None and (
                self.n_calls == fault.first or (fault.lasting and self.n_calls > fault.first)
            )
        (target,) = buffers
        if fd == self._direct_fd and (offset % ALIGNMENT or len(target) % ALIGNMENT):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not strikes:
            return os.preadv(fd, buffers, offset)
        assert fault is not None
        match fault.kind:
            case "half":
                return os.preadv(fd, [target[: max(1, len(target) // 2)]], offset)
            case "one byte":
                return os.preadv(fd, [target[:1]], offset)
            case "nothing":
                return 0
        number = getattr(errno, fault.kind)
        raise OSError(number, os.strerror(number))
