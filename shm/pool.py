"""The slab pool: one memfd whose layout every process computes from the same few numbers.

    offset 0                                      page        page
    +---------------------------------------------+-----------+-----------+--
    | slot headers, 32 bytes each                 | class 0   | class 1   | …
    | generation u64 | layer u32 | expert u32 |   | slots     | slots     |
    | slab bytes u64 | reserved u64               |           |           |
    +---------------------------------------------+-----------+-----------+--

    one slot:  | gate window | up window | down window |      each a multiple of 4096 bytes

A window holds one range of the file with room for the alignment of direct I/O on both sides: file
offset ``o`` lands at ``window + o % ALIGNMENT``, whichever reader brings it, so a location depends
on slot and file alone.

A slot header is a *check*: the I/O worker writes it after the last byte of a slab, the compute
worker compares it with its grant. Readiness itself travels as a message.

This module knows no policy and no file format. The coordinator creates the pool and keeps its fd
for as long as workers may be respawned; compute gets a read-only descriptor.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from shm.huge_pages import fill_with_huge_pages, map_shared

ALIGNMENT = 4096  # unit of direct I/O: a multiple of every DIO alignment seen; also the page
HEADER = struct.Struct("<QIIQQ")
_CONTENT, _TWO_WORDS = struct.Struct("<QII"), struct.Struct("=QQ")
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module
MADV_POPULATE_READ = 22
POPULATE_BYTES = 64 << 20  # at once: takes up to 0.1 s, and then the next part is looked up
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


class PoolError(Exception):
    """The pool could not be created or mapped; the text says what is needed."""


def align_up(n_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def window_bytes(range_bytes: int) -> int:
    """Room for a range at any file offset, read with alignment on both sides.

    A range of n bytes touches at most ``ceil((n - 1) / A) + 1`` aligned units.
    """
    return align_up(range_bytes - 1) + ALIGNMENT


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size: `windows` are the bytes of the gate, up and down window."""

    n_slots: int
    windows: tuple[int, int, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(self.windows)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where every slot lies. Slots are numbered through all classes, in order."""

    classes: tuple[SlotClass, ...]

    @property
    def n_slots(self) -> int:
        """Slots of all classes."""
        return sum(cls.n_slots for cls in self.classes)

    @property
    def header_bytes(self) -> int:
        """Bytes of the header array, a multiple of the page."""
        return align_up(max(1, self.n_slots) * HEADER.size)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memfd."""
        return self.header_bytes + sum(cls.n_slots * cls.slot_bytes for cls in self.classes)

    def windows_of_slots(self) -> list[tuple[int, int, int]]:
        """Pool offset of the three windows of every slot, by slot number."""
        windows = []
        position = self.header_bytes
        for cls in self.classes:
            gate, up, _ = cls.windows
            for _ in range(cls.n_slots):
                windows.append((position, position + gate, position + gate + up))
                position += cls.slot_bytes
        return windows

    def class_of_slots(self) -> list[int]:
        """Class of every slot, by slot number."""
        return [index for index, cls in enumerate(self.classes) for _ in range(cls.n_slots)]


def header_words(generation: int, layer: int, expert: int) -> tuple[int, int]:
    """The first two words of 64 bits of the header of a slot that holds this content."""
    first, second = _TWO_WORDS.unpack(_CONTENT.pack(generation, layer, expert))
    return first, second


def create_pool(layout: PoolLayout) -> int:
    """Create, allocate and seal the memfd; returns its descriptor.

    Every page is allocated here, huge ones where there are any, so that a shortage shows now and as
    an error: a sparse pool is a crash later. Over a cgroup limit `posix_fallocate` does not fail,
    the process is killed; check the budget before. Raises `PoolError`.
    """
    fd = os.memfd_create("moe-coord-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.total_bytes)
        fill_with_huge_pages(fd, layout.total_bytes)
        os.posix_fallocate(fd, 0, layout.total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        reason = {
            errno.ENOSPC: "no memory left",
            errno.EFBIG: "RLIMIT_FSIZE is smaller (see `ulimit -f`)",
            errno.ENOMEM: "no memory left",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        raise PoolError(
            f"pool: cannot allocate {layout.total_bytes} bytes: {reason}; use a smaller --pool"
        ) from error
    return fd


def read_only(fd: int) -> int:
    """A second descriptor of the pool that cannot be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def allocated_bytes(fd: int) -> int:
    """Memory that the pool holds now."""
    return os.fstat(fd).st_blocks * 512


class PoolMapping:
    """The pool mapped into this process. `view` is the whole pool; close it only when no array or
    memoryview of it lives any more. The descriptor stays the caller's, and open."""

    def __init__(self, fd: int, layout: PoolLayout, *, writable: bool) -> None:
        self.layout = layout
        self.windows = layout.windows_of_slots()
        self._fd = fd
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map, self._start = map_shared(fd, layout.total_bytes, protection)
        except OSError as error:
            raise PoolError(
                f"pool: cannot map {layout.total_bytes} bytes: {error.strerror}; "
                "use a smaller --pool or raise `ulimit -v`"
            ) from error
        view = memoryview(self._map)[self._start : self._start + layout.total_bytes]
        self.view = view if writable else view.toreadonly()

    def write_header(
        self, slot: int, generation: int, layer: int, expert: int, n_bytes: int
    ) -> None:
        """Say what the slot holds now. Only after its last byte is written."""
        HEADER.pack_into(self.view, self.header_start(slot), generation, layer, expert, n_bytes, 0)

    def holds(self, slot: int, generation: int, layer: int, expert: int) -> bool:
        """Whether the slot's header names this content."""
        found = HEADER.unpack_from(self.view, self.header_start(slot))
        return found[:3] == (generation, layer, expert)

    def header_start(self, slot: int) -> int:
        """Pool offset of the slot's header, a multiple of 8."""
        return slot * HEADER.size

    @property
    def is_whole(self) -> bool:
        """Whether the pool holds all its memory: nothing of it went back to the system."""
        return allocated_bytes(self._fd) >= self.layout.total_bytes

    def populate(self, *, writable: bool) -> None:
        """Set up the page table entries of all memory that the pool holds now: a first touch costs
        1.6 CPU seconds per GB later. What was given back to the system stays there."""
        advice = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
        position = 0
        while (part := self._held_from(position)) is not None:
            start, stop = part
            self._advise(advice, start, stop - start)
            position = stop

    def _held_from(self, position: int) -> tuple[int, int] | None:
        """The next part that has memory, [start, stop); None where there is no more.

        Looked up part by part, since the pool may shrink meanwhile. The kernel calls a hole what
        has memory and was never written, as in a new pool: there the whole tells of the parts.
        """
        total_bytes = self.layout.total_bytes
        if position >= total_bytes:
            return None
        if self.is_whole:
            return position, min(position + POPULATE_BYTES, total_bytes)
        try:
            start = os.lseek(self._fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return None  # a hole up to the end
        stop = os.lseek(self._fd, start, os.SEEK_HOLE)
        return start, min(start + POPULATE_BYTES, stop)

    def populate_range(self, start: int, n_bytes: int) -> None:
        """The same for one slot, for writing. `start` and `n_bytes` are multiples of the page."""
        self._advise(MADV_POPULATE_WRITE, start, n_bytes)

    def copy(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on, past the mapping: it gets no page table
        entries. Raises `OSError`."""
        done = 0
        while done < len(target):
            done += os.preadv(self._fd, [target[done:]], start + done)

    def close(self) -> None:
        """Unmap."""
        self.view.release()
        self._map.close()

    def _advise(self, advice: int, start: int, n_bytes: int) -> None:
        """`madvise` where the kernel knows the advice; older ones populate at first touch."""
        try:
            self._map.madvise(advice, self._start + start, n_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def punch_hole(fd: int, start: int, n_bytes: int) -> bool:
    """Give the memory of a free slot back to the system; a later write allocates it again.

    Whether all of it went: the ends lie in huge pages that other slots share, and stay, as zeros,
    while a direct read goes into such a page. To be done again then. Raises `OSError`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    result = libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(n_bytes))
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"pool: cannot punch a hole: {os.strerror(number)}")
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= start + n_bytes
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return True  # a hole up to the end
