"""The model files as one range of addresses: what regions 1..n of a `Location` mean.

    region 1                 region 2                 region 3
    | file 0           | pad | file 1           | pad | file 2 …      each at the start of a page

Files lie one after another, so an offset that is larger than its file goes on in the next ones:
the matrices of an expert that lie in different files still have one region, that of the first.
Every process that computes or warms has such a range of its own; where it begins is its own matter.

A page that is read and cannot be had (the file shrank, the disk failed) ends the process with
SIGBUS. This module knows no tensors.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence

from shm.huge_pages import MAP_FAILED, MAP_FIXED
from shm.pool import ALIGNMENT, align_up

PROT_NONE = 0  # not in Python's mmap module


def file_starts(file_sizes_bytes: Sequence[int]) -> tuple[int, ...]:
    """Where each file begins within the range, and where the range ends."""
    starts = [0]
    for n_bytes in file_sizes_bytes:
        starts.append(starts[-1] + align_up(n_bytes))
    return tuple(starts)


class MappedFiles:
    """Open files mapped for reading. `view` is the whole range.

    Python's own `mmap` hides the address of what may not be written, and keeps the interpreter's
    lock in `madvise`; so the system is called by hand.
    """

    def __init__(self, fds: Sequence[int], file_sizes_bytes: Sequence[int]) -> None:
        self.starts = file_starts(file_sizes_bytes)
        self.n_bytes = self.starts[-1]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = self._map(0, self.n_bytes, PROT_NONE, reserved, -1)
        for fd, n_bytes, start in zip(fds, file_sizes_bytes, self.starts, strict=False):
            flags = mmap.MAP_SHARED | MAP_FIXED
            self._map(self.address + start, n_bytes, mmap.PROT_READ, flags, fd)
        memory = (ctypes.c_ubyte * self.n_bytes).from_address(self.address)
        self.view = memoryview(memory).cast("B").toreadonly()

    def touch(self, start: int, stop: int) -> None:
        """Read the first byte of every page of ``[start, stop)``, `start` being that of a page."""
        self.view[start:stop:ALIGNMENT].tobytes()

    def advise(self, start: int, stop: int, advice: int) -> None:
        """`madvise` for ``[start, stop)``; raises `OSError`."""
        address = ctypes.c_void_p(self.address + start)
        if self._libc.madvise(address, ctypes.c_size_t(stop - start), advice) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Unmap. Nothing may be using it any more."""
        self.view.release()
        self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.n_bytes))

    def _map(self, address: int, n_bytes: int, protection: int, flags: int, fd: int) -> int:
        found: int = self._libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(n_bytes),
            protection,
            flags,
            fd,
            ctypes.c_long(0),
        )
        if found == MAP_FAILED:
            raise MemoryError(
                f"model files: cannot map {n_bytes} bytes: {os.strerror(ctypes.get_errno())}; "
                "use --reader direct or raise `ulimit -v`"
            )
        return found
