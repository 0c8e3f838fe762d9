"""The page cache of a model's files: dropped before a block, and looked at around it.

Cached pages are shared by all groups: what another process reads of the file is free for the
program that is measured, whatever its cap. So how much was cached is part of every block.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from io_worker import page_cache

DROP_ALL = "3\n"  # page cache, and the directory entries and inodes with it
LOOK_BYTES = 256 * 1024 * 1024  # of address space at once


def drop_cache(paths: Iterable[Path], root: Path = Path("/")) -> str:
    """Let go of cached pages: all of them where that is allowed, else those of the files.

    Returns what was done. Pages that some process has mapped stay.
    """
    try:
        os.sync()  # what is not written yet cannot be dropped
        (root / "proc/sys/vm/drop_caches").write_text(DROP_ALL)
        return "dropped, all of it (drop_caches)"
    except OSError:
        return drop_files(paths)


def drop_files(paths: Iterable[Path]) -> str:
    """Let go of the cached pages of these files, and of no others; returns what was done."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)  # what is not written yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "dropped for the model's files (POSIX_FADV_DONTNEED)"


def cached_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of the files that are in the page cache; None where the kernel does not tell.

    mincore(2), for kernels without cachestat(2), calls everything cached in a file that belongs to
    somebody else. Raises `OSError`.
    """
    total = 0
    for path in paths:
        with path.open("rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            found = page_cache.cached_bytes(file.fileno(), 0, n_bytes) if n_bytes else 0
        if found is None and not os.access(path, os.W_OK):
            return None
        total += _cached_pages(path) * mmap.PAGESIZE if found is None else found
    return total


def _cached_pages(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    n_cached = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, LOOK_BYTES):
            n_bytes = min(LOOK_BYTES, size - start)
            # private and never touched: writable only because an address is given for no other
            with mmap.mmap(file.fileno(), n_bytes, flags=mmap.MAP_PRIVATE, offset=start) as mapping:
                first = ctypes.c_char.from_buffer(mapping)
                pages = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
                address = ctypes.c_void_p(ctypes.addressof(first))
                failed = libc.mincore(address, ctypes.c_size_t(n_bytes), pages)
                del first
                if failed:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), str(path))
                n_cached += sum(page & 1 for page in bytes(pages))
    return n_cached
