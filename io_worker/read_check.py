"""Checks what the coordinator asks for before a byte of the pool is touched.

The coordinator is our own process, but its figures become memory addresses here. Whatever does not
fit slot, window and file is answered with `ReadFailed`. This module reads nothing and writes
nothing.
"""

from collections.abc import Sequence

from io_worker.reader import ReadError
from shm.messages import ReadRange, SlabRead
from shm.pool import ALIGNMENT, PoolLayout, align_up

MAX_KEY = 2**32 - 1  # layer and expert are u32 in the slot header

Window = tuple[int, int]  # pool bytes [start, stop)


def slot_windows(layout: PoolLayout) -> list[tuple[Window, Window, Window]]:
    """Start and stop of the gate, up and down window of every slot, by slot number."""
    windows = []
    for (gate, up, down), index in zip(
        layout.windows_of_slots(), layout.class_of_slots(), strict=True
    ):
        stop = gate + layout.classes[index].slot_bytes
        windows.append(((gate, up), (up, down), (down, stop)))
    return windows


def check_read(
    read: SlabRead,
    windows: Sequence[tuple[Window, Window, Window]],
    file_sizes_bytes: Sequence[int],
) -> tuple[Window, ...]:
    """The windows that the ranges of `read` go to; raises `ReadError` if anything does not fit.

    Three ranges go to gate, up and down window; the one range of a packed file to the whole slot.
    """
    slot = read.lease.slot
    if slot >= len(windows):
        raise _refusal(read, f"expected a slot below {len(windows)}")
    if read.layer > MAX_KEY or read.expert > MAX_KEY:
        raise _refusal(read, f"expected layer and expert of at most {MAX_KEY}")
    gate, up, down = windows[slot]
    if len(read.ranges) == 3:
        targets: tuple[Window, ...] = (gate, up, down)
    elif len(read.ranges) == 1:
        targets = ((gate[0], down[1]),)
    else:
        raise _refusal(read, f"expected 3 ranges or 1, found {len(read.ranges)}")
    for wanted, window in zip(read.ranges, targets, strict=True):
        problem = _problem_of(wanted, window, file_sizes_bytes)
        if problem is not None:
            raise _refusal(read, problem)
    return targets


def check_cached_read(read: SlabRead, file_sizes_bytes: Sequence[int]) -> None:
    """The same where the page cache is the only cache: files and ranges, there are no slots."""
    for wanted in read.ranges:
        problem = _problem_in_file(wanted, file_sizes_bytes)
        if problem is not None:
            raise _refusal(read, problem)


def _problem_of(wanted: ReadRange, window: Window, file_sizes_bytes: Sequence[int]) -> str | None:
    return _problem_in_file(wanted, file_sizes_bytes) or _problem_in_window(wanted, window)


def _problem_in_file(wanted: ReadRange, file_sizes_bytes: Sequence[int]) -> str | None:
    if wanted.file >= len(file_sizes_bytes):
        return f"expected a file below {len(file_sizes_bytes)}, found {wanted.file}"
    if wanted.n_bytes < 1:
        return "expected at least 1 byte"
    file_bytes = file_sizes_bytes[wanted.file]
    if wanted.file_offset + wanted.n_bytes > file_bytes:
        return (
            f"expected a range within {file_bytes} bytes of file {wanted.file}, found "
            f"{wanted.n_bytes} at byte {wanted.file_offset}"
        )
    return None


def _problem_in_window(wanted: ReadRange, window: Window) -> str | None:
    head = wanted.file_offset % ALIGNMENT
    if wanted.pool_offset != window[0] + head:
        return f"expected pool byte {window[0] + head}, found {wanted.pool_offset}"
    if window[0] + align_up(head + wanted.n_bytes) > window[1]:
        return (
            f"expected a range that fits a window of {window[1] - window[0]} bytes, found "
            f"{wanted.n_bytes} at byte {wanted.file_offset}"
        )
    return None


def _refusal(read: SlabRead, problem: str) -> ReadError:
    where = f"layer {read.layer} expert {read.expert} to slot {read.lease.slot}"
    return ReadError(0, f"read of {where} refused: {problem}")
