"""The page cache: what of a file is in it, and how to warm it where it is the only cache.

    mmap      touch one byte of every page: the faults that compute would have, elsewhere
    willneed  MADV_WILLNEED: ask for the pages, do not wait until they are there
    populate  MADV_POPULATE_READ: fault all of them in by one call

Nothing is copied: compute works on mappings of its own, and faults for what is missing. Whether
that costs a disk read is the kernel's secret; what a call brought in from the disk is known.

Rules: ranges are checked before they come here (`read_check`). A file that shrinks ends a process
that touches it with SIGBUS, which cannot be caught safely: whoever started it says what it means.
Touching keeps the interpreter's lock, so a process has one such fault at a time however many
threads it has; the two calls let it go.
"""

import ctypes
import errno
import mmap
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence

from io_worker.reader import FileSource, ModelFile, ReadError, ReadOutcome
from shm.mapped_files import MappedFiles
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, MADV_POPULATE_READ

SYS_CACHESTAT = 451  # Linux 6.5, the same number on every architecture we know
BLOCK_BYTES = 512  # unit of ru_inblock, whatever the disk's


def _touch(mapping: MappedFiles, start: int, stop: int) -> None:
    mapping.touch(start, stop)


def _will_need(mapping: MappedFiles, start: int, stop: int) -> None:
    mapping.advise(start, stop, mmap.MADV_WILLNEED)


def _populate(mapping: MappedFiles, start: int, stop: int) -> None:
    mapping.advise(start, stop, MADV_POPULATE_READ)


WARMERS: Mapping[str, Callable[[MappedFiles, int, int], None]] = {
    "mmap": _touch,
    "willneed": _will_need,
    "populate": _populate,
}


class CacheWarmer:
    """All model files behind one way of warming: in place of a `SlabReader` where there is no
    pool."""

    def __init__(self, files: Sequence[ModelFile], name: str) -> None:
        self.sources = tuple(FileSource(f, drop_cache=False, preadv=os.preadv) for f in files)
        self._mapped = _mapped(files)
        self._warm = WARMERS[name]

    def new_refusals(self) -> list[str]:
        """Nothing here falls back."""
        return []

    def read(self, wanted: ReadRange) -> ReadOutcome:
        """Warm the pages of one checked range; raises `ReadError`.

        `bytes_read` is what this call brought in from the disk.
        """
        source = self.sources[wanted.file]
        base = self._mapped.starts[wanted.file]
        start = base + wanted.file_offset - wanted.file_offset % ALIGNMENT
        stop = base + wanted.file_offset + wanted.n_bytes
        before = _blocks_read()
        try:
            self._warm(self._mapped, start, stop)
        except OSError as error:
            source.check_now()  # a shrunken file is the better explanation
            raise ReadError(
                error.errno or 0,
                f"{source.file.path}: cannot bring {wanted.n_bytes} bytes at byte "
                f"{wanted.file_offset} into the page cache: {error.strerror}",
            ) from error
        source.check(time.monotonic_ns())
        return ReadOutcome((_blocks_read() - before) * BLOCK_BYTES, 0)

    def close(self) -> None:
        """Unmap the files."""
        self._mapped.close()


def populate_refusal(file: ModelFile) -> str | None:
    """Why MADV_POPULATE_READ cannot be used on a file, None if it can: Linux has it since 5.14."""
    mapping = _mapped([file])
    try:
        mapping.advise(0, min(ALIGNMENT, file.size_bytes), MADV_POPULATE_READ)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "this kernel has no MADV_POPULATE_READ"
        return f"{file.path}: MADV_POPULATE_READ refused ({error.strerror})"
    finally:
        mapping.close()
    return None


def cached_bytes(fd: int, start: int, n_bytes: int) -> int | None:
    """How much of a file's bytes is in the page cache; None where the kernel does not tell.

    cachestat(2). mincore(2) would do on older kernels, but it calls everything cached when the
    file belongs to somebody else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    asked = (ctypes.c_uint64 * 2)(start, n_bytes)
    found = (ctypes.c_uint64 * 5)()  # pages: cached, dirty, under writeback, evicted, lately so
    number = ctypes.c_long(SYS_CACHESTAT)
    if n_bytes == 0 or libc.syscall(number, fd, ctypes.byref(asked), ctypes.byref(found), 0) != 0:
        return None
    return int(found[0]) * ALIGNMENT


def _mapped(files: Sequence[ModelFile]) -> MappedFiles:
    return MappedFiles([file.fd for file in files], [file.size_bytes for file in files])


def _blocks_read() -> int:
    """Blocks that the calling thread had to fetch so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
