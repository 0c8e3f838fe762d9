"""Brings ranges of the model files into the pool.

Every reader leaves the bytes at the same place: file offset ``o`` lands at ``window + o %
ALIGNMENT``. Direct I/O needs offset, length and memory aligned, and GGUF aligns tensors to 32 bytes
only, so a direct read takes the aligned units around the range::

    file      |-----unit-----|-----unit-----|-----unit-----|
                    [ first byte asked for … last ]
    pool      |-head-[ pool_offset …              ]--tail--|
              ^ window start

The coordinator opens the files and hands the descriptors down, so a file that is renamed, deleted
or loses its permissions goes on being readable. A file that is *written to* cannot be used: size
and modification time are compared again and again.

Rules: figures are checked before they come here (`read_check`); a short read is normal; a refusal
of direct I/O at any read falls back to buffered for that file and loses nothing. This module knows
no messages, threads or slots.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shm.codec import MAX_INTEGER
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, align_up

CHECK_INTERVAL_NS = 100_000_000  # between two looks at a file's identity, less than 1 us each
# EINVAL and EFAULT come from file systems whose alignment rules are stricter than they say.
DIRECT_REFUSALS = frozenset({errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP})
# Linux 6.14; not in Python's os. What was in the page cache before stays there, unlike with
# POSIX_FADV_DONTNEED. Older kernels and other file systems answer EOPNOTSUPP.
RWF_DONTCACHE = 0x80

Preadv = Callable[..., int]  # `os.preadv`


class ModelFileError(Exception):
    """A model file cannot be opened; the text is one line with its path."""


class ReadError(Exception):
    """A range could not be read. `errno` is 0 where the text alone says it."""

    def __init__(self, number: int, text: str, *, model_changed: bool = False) -> None:
        super().__init__(text)
        self.errno = number
        self.model_changed = model_changed


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open model file and what tells that it is still the same. Travels in settings."""

    path: str  # for messages only: printable, not to be opened
    fd: int
    direct_fd: int | None
    direct_refusal: str  # why `direct_fd` is None, else empty
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """`bytes_read` of the range itself, `bytes_over_read` that alignment or repetition added."""

    bytes_read: int
    bytes_over_read: int


def open_files(paths: Sequence[str | os.PathLike[str]]) -> list[ModelFile]:
    """Open every path for buffered and, where possible, direct reading; raises `ModelFileError`.

    The caller closes with `close_files` and passes the descriptors on with `descriptors`.
    """
    files: list[ModelFile] = []
    try:
        for path in paths:
            files.append(_open(path))
    except BaseException:
        close_files(files)
        raise
    return files


def descriptors(files: Iterable[ModelFile]) -> tuple[int, ...]:
    """All descriptors of the files: what a child inherits."""
    return tuple(fd for file in files for fd in (file.fd, file.direct_fd) if fd is not None)


def close_files(files: Iterable[ModelFile]) -> None:
    """Close what `open_files` opened."""
    for fd in descriptors(files):
        os.close(fd)


def change_of(file: ModelFile) -> str | None:
    """What about the file is not as it was when it was opened, None if nothing is."""
    try:
        found = _identity(os.fstat(file.fd))
    except OSError as error:
        return f"{file.path}: cannot be looked at any more ({error.strerror})"
    expected = (file.device, file.inode, file.size_bytes, file.mtime_ns)
    if found == expected:
        return None
    names = ("device", "inode", "size", "modification time")
    differences = [
        f"{name} {was} is now {now}"
        for name, was, now in zip(names, expected, found, strict=True)
        if was != now
    ]
    return f"{file.path}: model changed on disk ({', '.join(differences)}); start again"


def _open(path: str | os.PathLike[str]) -> ModelFile:
    printable = os.fsencode(path).decode("utf-8", "backslashreplace")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{printable}: cannot open: {reason}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{printable}: expected a regular file, found another kind")
        direct_fd, refusal = _open_direct(fd)
    except BaseException:
        os.close(fd)
        raise
    return ModelFile(printable, fd, direct_fd, refusal, *_identity(status))


def _open_direct(fd: int) -> tuple[int | None, str]:
    """The same file again, by descriptor: the path may name another one by now."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), ""
    except OSError as error:
        return None, f"O_DIRECT refused at open ({error.strerror})"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    # messages carry 63 bits; times before 1970 and odd file systems must not break them
    device, inode, mtime_ns = (
        figure & MAX_INTEGER for figure in (status.st_dev, status.st_ino, status.st_mtime_ns)
    )
    return device, inode, status.st_size, mtime_ns


class FileSource:
    """One file as the readers see it, with what was learned about it: refusals and changes.

    Several threads read through it at once; what they write here is one reference each.
    """

    def __init__(self, file: ModelFile, *, drop_cache: bool, preadv: Preadv) -> None:
        self.file = file
        self.drop_cache = drop_cache
        self.drops_behind = drop_cache  # the kernel lets go of what it read; False: we have to
        self.direct_refusal = file.direct_refusal
        self.change: str | None = None
        self._preadv = preadv
        self._next_check_ns = 0

    def read(self, fd: int, target: memoryview, offset: int, *flags: int) -> int:
        """One `preadv`; EIO is tried once more. Returns the bytes read, raises `ReadError`."""
        try:
            try:
                return self._preadv(fd, [target], offset, *flags)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return self._preadv(fd, [target], offset, *flags)
        except OSError as error:
            raise ReadError(
                error.errno or 0,
                f"{self.file.path}: cannot read {len(target)} bytes at byte {offset}: "
                f"{os.strerror(error.errno or 0)}",
            ) from error

    def read_cached(self, target: memoryview, offset: int) -> int:
        """The same through the page cache; a refusal to drop behind is met once per file."""
        if self.drops_behind:
            try:
                return self.read(self.file.fd, target, offset, RWF_DONTCACHE)
            except ReadError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self.drops_behind = False
        return self.read(self.file.fd, target, offset)

    def check(self, now_ns: int) -> None:
        """Raise `ReadError` if the file changed; looks at it once per `CHECK_INTERVAL_NS`."""
        if self.change is None and now_ns >= self._next_check_ns:
            self.change = change_of(self.file)
            # after the look: a second thread must not pass while the first one is still looking
            self._next_check_ns = now_ns + CHECK_INTERVAL_NS
        if self.change is not None:
            raise ReadError(0, self.change, model_changed=True)

    def check_now(self) -> None:
        """The same after an anomaly: at once."""
        self._next_check_ns = 0
        self.check(1)

    def end_too_early(self, offset: int) -> ReadError:
        """The error for a read that returned nothing before the end of the range."""
        if self.change is None:
            self.change = f"{self.file.path}: model changed on disk (nothing at byte {offset})"
        return ReadError(0, self.change, model_changed=True)


def read_buffered(source: FileSource, wanted: ReadRange, view: memoryview) -> ReadOutcome:
    """Through the page cache, exactly the range; with `drop_cache` its pages are let go after."""
    return _finish_buffered(source, wanted, view, n_done=0, n_transferred=0)


def read_direct(source: FileSource, wanted: ReadRange, view: memoryview) -> ReadOutcome:
    """Past the page cache, the aligned units around the range straight into the pool."""
    direct_fd = source.file.direct_fd
    if direct_fd is None or source.direct_refusal:
        return read_buffered(source, wanted, view)
    head = wanted.file_offset % ALIGNMENT
    file_start, pool_start = wanted.file_offset - head, wanted.pool_offset - head
    n_needed = head + wanted.n_bytes
    n_units = align_up(n_needed)  # the last unit may lie beyond the end of the file: a short read
    n_done = 0
    while n_done < n_needed and n_done % ALIGNMENT == 0:
        target = view[pool_start + n_done : pool_start + n_units]
        try:
            n = source.read(direct_fd, target, file_start + n_done)
        except ReadError as error:
            if error.errno not in DIRECT_REFUSALS:
                raise
            source.direct_refusal = f"O_DIRECT refused at a read ({os.strerror(error.errno)})"
            break
        if n == 0:
            break
        n_done += n
    if n_done >= n_needed:
        return ReadOutcome(wanted.n_bytes, n_done - wanted.n_bytes)
    # refused, at the end of the file, or cut at an odd byte where direct I/O cannot go on
    return _finish_buffered(
        source, wanted, view, n_done=max(0, n_done - head), n_transferred=n_done
    )


def _finish_buffered(
    source: FileSource, wanted: ReadRange, view: memoryview, *, n_done: int, n_transferred: int
) -> ReadOutcome:
    """Read the rest of a range of which `n_done` bytes are there, from `n_transferred` read."""
    while n_done < wanted.n_bytes:
        offset = wanted.file_offset + n_done
        target = view[wanted.pool_offset + n_done : wanted.pool_offset + wanted.n_bytes]
        n = source.read_cached(target, offset)
        if n == 0:
            raise source.end_too_early(offset)
        n_done += n
        n_transferred += n
    if source.drop_cache and not source.drops_behind:
        start = wanted.file_offset - wanted.file_offset % ALIGNMENT
        stop = align_up(wanted.file_offset + wanted.n_bytes)
        with contextlib.suppress(OSError):  # an advice: where it is refused, memory is the price
            os.posix_fadvise(source.file.fd, start, stop - start, os.POSIX_FADV_DONTNEED)
    return ReadOutcome(wanted.n_bytes, n_transferred - wanted.n_bytes)
