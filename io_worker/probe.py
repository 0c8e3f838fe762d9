"""Tries the readers on the files before the first slab is asked for, and says what was chosen.

A file system may refuse O_DIRECT at open, at a read, or give other bytes than the page cache does;
none of the three is worth a list of file systems, so each file is tried. This module reads a few
units of each file and changes nothing.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from io_worker.reader import ModelFile
from io_worker.slab_reader import READERS
from shm.pool import ALIGNMENT

AUTO = "auto"
READER_NAMES = (AUTO, *READERS)


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The reader to use, a row of `READERS`, and one line that says why."""

    name: str
    reason: str


def choose_reader(wanted: str, files: Sequence[ModelFile]) -> ReaderChoice:
    """Resolve `auto`, and `direct` where a file refuses it. Files that refuse are read buffered one
    by one, so `direct` stays if it works on at least one."""
    if wanted not in (AUTO, "direct"):
        return ReaderChoice(wanted, "asked for")
    refusals = [refusal for file in files if (refusal := direct_refusal(file)) is not None]
    if not refusals:
        return ReaderChoice("direct", "O_DIRECT works on every model file")
    if len(refusals) < len(files):
        reason = f"{len(refusals)} of {len(files)} files are read buffered: {refusals[0]}"
        return ReaderChoice("direct", reason)
    return ReaderChoice("buffered", f"direct does not work: {refusals[0]}")


def direct_refusal(file: ModelFile) -> str | None:
    """Why direct reading does not work on this file, None if it does."""
    if file.direct_fd is None:
        return f"{file.path}: {file.direct_refusal}"
    last_unit = (file.size_bytes - 1) // ALIGNMENT * ALIGNMENT if file.size_bytes else 0
    with mmap.mmap(-1, 2 * ALIGNMENT) as memory:  # aligned, and shared like the pool
        for offset in dict.fromkeys((0, last_unit)):
            problem = _compare(file, file.direct_fd, offset, memory)
            if problem is not None:
                return f"{file.path}: {problem} at byte {offset}"
    return None


def _compare(file: ModelFile, direct_fd: int, offset: int, memory: mmap.mmap) -> str | None:
    """One unit read both ways; the two halves of `memory` are the destinations."""
    n_expected = min(ALIGNMENT, file.size_bytes - offset)
    with memoryview(memory) as view:
        direct, buffered = view[:ALIGNMENT], view[ALIGNMENT:]
        try:
            n_direct = os.preadv(direct_fd, [direct], offset)
        except OSError as error:
            return f"O_DIRECT refused ({error.strerror})"
        try:
            n_buffered = os.preadv(file.fd, [buffered], offset)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        is_same = direct[:n_expected] == buffered[:n_expected]
        direct.release()
        buffered.release()
    if n_direct < n_expected or n_buffered < n_expected:
        return f"expected {n_expected} bytes, found {n_direct} direct and {n_buffered} buffered"
    return None if is_same else "direct and buffered bytes differ"
