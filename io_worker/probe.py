"""Tries the readers on the files before the first slab is asked for, and says what was chosen.

A file system may refuse O_DIRECT at open, at a read, or give other bytes than the page cache does;
none of the three is worth a list of file systems, so each file is tried. Which reader is faster is
tried too (`reader_trial`), unless most of the file is in memory already. This module reads a little
of each file and changes nothing.
"""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from io_worker.page_cache import WARMERS, cached_bytes, populate_refusal
from io_worker.reader import ModelFile, ReadError
from io_worker.reader_trial import Workload, bytes_per_second
from io_worker.slab_reader import READERS
from shm.pool import ALIGNMENT

AUTO = "auto"
READER_NAMES = (AUTO, *READERS, *WARMERS)
MiB = 1 << 20
MIN_TRIAL_BYTES = 256 * MiB  # of all experts: of fewer a trial would read a large part
MIN_BUFFERED_GAIN = 1.25  # it costs half a core that computes otherwise
TRIALS = ("direct", "buffered", "buffered", "direct")  # a drift of the disk falls on both alike
MAX_TRIALS_SECONDS = 0.3  # then no new one is begun: the disk is slow, whoever reads


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The reader to use, a row of `READERS` or `WARMERS`, and one line that says why."""

    name: str
    reason: str


def choose_reader(
    wanted: str, files: Sequence[ModelFile], workload: Workload | None = None
) -> ReaderChoice:
    """Resolve `auto`, and `direct` where a file refuses it. Files that refuse are read buffered one
    by one, so `direct` stays if it works on at least one. Without a workload nothing is timed."""
    if wanted == "populate":
        refusal = next(filter(None, map(populate_refusal, files)), None)
        if refusal is not None:
            return ReaderChoice("mmap", f"populate does not work: {refusal}")
    if wanted not in (AUTO, "direct"):
        return ReaderChoice(wanted, "asked for")
    refusals = [refusal for file in files if (refusal := direct_refusal(file)) is not None]
    if not refusals:
        if wanted == AUTO and workload is not None:
            return _faster(files, workload)
        return ReaderChoice("direct", "O_DIRECT works on every model file")
    if len(refusals) < len(files):
        reason = f"{len(refusals)} of {len(files)} files are read buffered: {refusals[0]}"
        return ReaderChoice("direct", reason)
    return ReaderChoice("buffered", f"direct does not work: {refusals[0]}")


def _faster(files: Sequence[ModelFile], workload: Workload) -> ReaderChoice:
    """Between direct and buffered where both work."""
    expert_bytes = workload.slabs.total_bytes
    if expert_bytes < MIN_TRIAL_BYTES:
        return ReaderChoice("direct", "O_DIRECT works on every model file")
    all_bytes = sum(file.size_bytes for file in files)
    # whole pages: a little more than the bytes of the file
    cached = min(all_bytes, sum(cached_bytes(file.fd, 0, file.size_bytes) or 0 for file in files))
    if 2 * cached > all_bytes and expert_bytes <= workload.spare_bytes:
        share = 100 * cached // all_bytes
        return ReaderChoice("buffered", f"{share} % of the model is in the page cache and may stay")
    speeds: dict[str, list[float]] = {"direct": [], "buffered": []}
    started = time.monotonic()
    try:
        for name in TRIALS:
            if time.monotonic() - started < MAX_TRIALS_SECONDS:
                speeds[name].append(bytes_per_second(name, files, workload))
    except ReadError as error:
        return ReaderChoice("direct", f"O_DIRECT works on every model file; no trial: {error}")
    return faster_of(speeds["direct"], speeds["buffered"], workload)


def faster_of(
    direct: Sequence[float], buffered: Sequence[float], workload: Workload
) -> ReaderChoice:
    """Buffered if each of its trials beat each direct one, and none is missing."""
    is_complete = len(direct) + len(buffered) == len(TRIALS)
    wins = is_complete and min(buffered) > MIN_BUFFERED_GAIN * max(direct)
    shown = [
        f"{name} {' and '.join(f'{speed / 1e9:.2f}' for speed in found)} GB/s"
        for name, found in (("direct", direct), ("buffered", buffered))
        if found
    ]
    reason = (
        f"tried {workload.n_at_once} x {workload.largest_range_bytes / MiB:.2f} MiB at once: "
        f"{', '.join(shown)}"
    )
    return ReaderChoice("buffered" if wins else "direct", reason)


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
