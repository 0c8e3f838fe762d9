"""Shared memory in huge pages: a memfd that is made of them, and mappings that make use of them.

Pages that the system hands out one by one lie anywhere in its memory. A direct read into them is
cut where its list of pieces is full, and each page is looked up for itself; measured on a virtual
disk, a lone read of 1.1 MiB took up to twice as long, and twice the processor time. The kernels
read huge pages faster too, and no process has page tables for them.

The kernel makes huge pages of a memfd where they are asked for by hand (Linux 6.1), whatever
``transparent_hugepage/shmem_enabled`` says of those that come by themselves. It maps them as such
only where address and file offset agree, so byte 0 of the file is mapped at a boundary. All of it
is a matter of speed: what the system refuses comes in small pages.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1; this and the next ones are not in Python's mmap module
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value


def fill_with_huge_pages(fd: int, n_bytes: int) -> None:
    """Give an empty memfd its memory, as far as huge pages go: the rest stays holes.

    Stops at the first that cannot be had.
    """
    n_huge_bytes = n_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if n_huge_bytes == 0:
        return
    with contextlib.suppress(OSError):
        mapping, start = map_shared(fd, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        with mapping:
            for offset in range(0, n_huge_bytes, HUGE_PAGE_BYTES):
                os.pwrite(fd, b"\0", offset)  # where there is no page at all nothing is made
                mapping.madvise(MADV_COLLAPSE, start + offset, HUGE_PAGE_BYTES)


def make_huge_again(fd: int, n_bytes: int, pages: Iterable[int]) -> None:
    """Make huge pages of the small ones in these places of a memfd of so many bytes, place i being
    its bytes from i * `HUGE_PAGE_BYTES` on. What they hold stays, and a hole in one takes memory.

    Leaves as they are those that the system holds for a direct read, and all after the first for
    which it finds no room.
    """
    with contextlib.suppress(OSError):
        mapping, start = map_shared(fd, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        with mapping:
            for page in pages:
                offset = page * HUGE_PAGE_BYTES
                if offset + HUGE_PAGE_BYTES > n_bytes:
                    continue
                try:
                    mapping.madvise(MADV_COLLAPSE, start + offset, HUGE_PAGE_BYTES)
                except OSError as error:
                    if error.errno == errno.ENOMEM:
                        raise


def map_shared(fd: int, n_bytes: int, protection: int) -> tuple[mmap.mmap, int]:
    """Map a file from its first byte on; raises `OSError`.

    Returns a mapping and where in it the file begins. Closing it unmaps the file. It looks writable
    to Python whatever the protection is.
    """
    # Python's mmap cannot be told where to map: it reserves the addresses, and ends with them
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapping = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, private)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    found = libc.mmap(
        ctypes.c_void_p(address + start),
        ctypes.c_size_t(n_bytes),
        protection,
        mmap.MAP_SHARED | MAP_FIXED,
        fd,
        ctypes.c_long(0),
    )
    if found == MAP_FAILED:
        number = ctypes.get_errno()
        mapping.close()
        raise OSError(number, os.strerror(number))
    return mapping, start


@contextlib.contextmanager
def pool_like_buffer(n_bytes: int) -> Iterator[memoryview]:
    """Memory of the kind that a pool has, to measure reads into it; raises `OSError`."""
    n_whole_bytes = -(-n_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fd = os.memfd_create("moe-coord-buffer", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, n_whole_bytes)
        fill_with_huge_pages(fd, n_whole_bytes)
        mapping, start = map_shared(fd, n_whole_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    with mapping, memoryview(mapping)[start : start + n_bytes] as view:
        yield view
