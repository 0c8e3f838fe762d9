"""The unfinished packed file: what of it is written survives every kind of end.

`OUT.part` has its final size and header from the start, but for two things: the first 8 bytes are
4 zeros and a digest of the source's identity, so that nothing takes it for a model and no other
source goes on with it; and a checksum is 0 until the bytes it is of are on the disk. To finish,
the header's own checksum is written, then magic and version, then the name. One writer at a time:
the file is locked.

Rules: data are flushed before their checksums are written. Nothing that has another name than
`OUT.part`, or is no part of ours, is ever written to.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import format_size
from coordinator.models.packed_header import START, PackedFile
from coordinator.processes.limits import ResourceError
from io_worker.packed_layout import CHECKSUM_BYTES, CHECKSUMS_AT, header_checksum
from io_worker.reader import ModelFile

IDENTITY_BYTES = 4
SPARE_BYTES = 16 * 1024 * 1024  # left free on the disk
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def identity_of(files: Sequence[ModelFile]) -> bytes:
    """Changes when a file of the source is another or was written to."""
    seen = [(file.device, file.inode, file.size_bytes, file.mtime_ns) for file in files]
    return hashlib.blake2b(repr(seen).encode(), digest_size=IDENTITY_BYTES).digest()


class PartFile:
    """The file behind `OUT.part`, open for writing. `checksums` are those of the units."""

    def __init__(self, fd: int, out: Path, packed: PackedFile, identity: bytes) -> None:
        self.checksums = [0] * len(packed.units)
        self.was_begun = False  # by an earlier run, and goes on
        self._fd = fd
        self._out = out
        self._packed = packed
        self._start = bytes(len(START) - IDENTITY_BYTES) + identity
        self._begin()

    @property
    def n_done(self) -> int:
        """Units that are there: batches are committed in order."""
        return self.checksums.index(0) if 0 in self.checksums else len(self.checksums)

    def write(self, data: memoryview, offset: int) -> None:
        """All of the bytes, anywhere in the file. Several threads write at once."""
        while data:
            n_written = os.pwrite(self._fd, data, offset)
            data, offset = data[n_written:], offset + n_written

    def commit(self, units: range, checksums: Sequence[int]) -> None:
        """The bytes of these units are written: flush them, then say so."""
        os.fdatasync(self._fd)
        start, stop = self._packed.places[units.start][0], self._packed.total_bytes
        os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)
        self.checksums[units.start : units.stop] = checksums
        encoded = b"".join(found.to_bytes(CHECKSUM_BYTES, "little") for found in checksums)
        at = CHECKSUMS_AT + (1 + units.start) * CHECKSUM_BYTES
        self.write(memoryview(encoded), at)

    def finish(self) -> None:
        """Everything is written: make it a model and give it its name."""
        assert all(self.checksums)
        own = header_checksum(self._packed.header, self._packed.n_checksums)
        self.write(memoryview(own.to_bytes(CHECKSUM_BYTES, "little")), CHECKSUMS_AT)
        os.fsync(self._fd)
        self.write(memoryview(START), 0)
        os.fsync(self._fd)
        part = part_of(self._out)
        try:
            os.link(part, self._out)  # unlike a rename it never replaces a file
        except FileExistsError as error:
            raise ConfigError(
                f"OUT: expected a new file, found {str(self._out)!a} there; delete it, and pack "
                "again to give the finished file its name"
            ) from error
        except OSError:  # a file system without hard links
            part.rename(self._out)
        else:
            part.unlink()
        folder = os.open(self._out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _begin(self) -> None:
        """Go on with what is there, or start from nothing."""
        header, stop = self._packed.header, self._packed.checksums_stop
        found = os.pread(self._fd, len(header), 0)
        if not _is_ours(found, header):
            raise ConfigError(
                f"OUT: expected {str(part_of(self._out))!a} to be an unfinished packed file or "
                "nothing, found another file; move it away"
            )
        is_same = found[:8] in (self._start, START) and (
            found[8:CHECKSUMS_AT] == header[8:CHECKSUMS_AT] and found[stop:] == header[stop:]
        )
        if is_same and os.fstat(self._fd).st_size == self._packed.total_bytes:
            array = found[CHECKSUMS_AT + CHECKSUM_BYTES : stop]
            self.checksums = [
                int.from_bytes(array[at : at + CHECKSUM_BYTES], "little")
                for at in range(0, len(array), CHECKSUM_BYTES)
            ]
            self.was_begun = True
            return
        os.ftruncate(self._fd, 0)
        os.posix_fallocate(self._fd, 0, self._packed.total_bytes)
        self.write(memoryview(self._start + header[len(START) :]), 0)


def part_of(out: Path) -> Path:
    """Where the unfinished file lies."""
    return out.with_name(out.name + ".part")


def _is_ours(found: bytes, header: bytes) -> bool:
    """Nothing yet, or begun by some version of ours for some model."""
    key = slice(24, CHECKSUMS_AT - 8)  # the first key up to its number of elements
    zeros = bytes(len(START) - IDENTITY_BYTES)
    has_key = found[:4] in (zeros, START[:4]) and found[key] == header[key]
    return not any(found) or has_key


@contextlib.contextmanager
def part_file(out: Path, packed: PackedFile, identity: bytes) -> Iterator[PartFile]:
    """Open or go on with `OUT.part`; it stays behind unless it was finished.

    Raises `ConfigError` for a place that cannot be used, `ResourceError` for a disk without room.
    """
    _check_place(out, packed.total_bytes)
    part = part_of(out)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(part, flags, 0o666)
        try:
            _lock(fd, part)
            yield PartFile(fd, out, packed, identity)
        finally:
            os.close(fd)
    except OSError as error:
        text = f"{out}: cannot be written: {error.strerror}"
        if error.errno in NO_ROOM:
            raise _no_room(out, packed.total_bytes, text) from error
        raise ConfigError(f"{text}; give another path") from error


def _check_place(out: Path, total_bytes: int) -> None:
    part = part_of(out)
    if not out.parent.is_dir():
        raise ConfigError(f"OUT: expected a folder {str(out.parent)!a}, found none; make it first")
    if os.path.lexists(out):
        if part.exists() and part.samefile(out):
            part.unlink()  # killed between the two names of the finished file
        raise ConfigError(
            f"OUT: expected a new file, found {str(out)!a} there; delete it or give another name"
        )
    held = part.stat().st_blocks * 512 if part.is_file() else 0
    disk = os.statvfs(out.parent)
    if disk.f_bavail * disk.f_frsize + held < total_bytes + SPARE_BYTES:
        raise _no_room(out, total_bytes, f"{out}: not enough room on its disk")


def _no_room(out: Path, total_bytes: int, text: str) -> ResourceError:
    disk = os.statvfs(out.parent)
    return ResourceError(
        f"{text}; expected {format_size(total_bytes + SPARE_BYTES)} for the packed file, found "
        f"{format_size(disk.f_bavail * disk.f_frsize)} free; make room or give another path"
    )


def _lock(fd: int, part: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConfigError(f"OUT: expected {str(part)!a} to be a regular file, found another kind")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"OUT: expected {str(part)!a} for this pack alone, found another that writes it; wait "
            "for its end"
        ) from error
