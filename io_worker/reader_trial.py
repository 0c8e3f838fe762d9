"""Tries readers against each other on the file itself, at the size and depth of the run.

What is faster depends on disk, file system and virtual machine, and no list knows them all. A trial
takes a fixed time and reads experts at random that are not in the page cache; it leaves none there.
"""

import mmap
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from io_worker.page_cache import cached_bytes
from io_worker.reader import ModelFile, ReadError
from io_worker.slab_reader import SlabReader
from io_worker.slabs import SlabRange, SlabTable
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, window_bytes

TRIAL_SECONDS = 0.08  # 100 MB of a fast disk, the first ranges of a slow one
MAX_THREADS = 8  # no disk seen needs more, and the buffers must stay small


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run will read: slabs of these sizes, so many ranges at once. `spare_bytes` is memory
    beside its budget that nobody uses."""

    slabs: SlabTable
    n_at_once: int
    spare_bytes: int

    @property
    def largest_range_bytes(self) -> int:
        """Of all slabs."""
        return max(found.n_bytes for layer in self.slabs.layers for found in layer.reads(0))


def bytes_per_second(
    name: str, files: Sequence[ModelFile], workload: Workload, seconds: float = TRIAL_SECONDS
) -> float:
    """Speed of one reader in a trial of so long; raises `ReadError`."""
    n_threads = min(workload.n_at_once, MAX_THREADS)
    window = window_bytes(workload.largest_range_bytes)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = mmap.mmap(-1, n_threads * window, flags)
    with memory, memoryview(memory) as view:
        reader = SlabReader(files, view, name, drop_cache=True)
        trial = _Trial(reader, _cold_ranges(files, workload.slabs), seconds)
        threads = [
            threading.Thread(target=trial.read, args=(index * window,))
            for index in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if trial.failure is not None:
            raise ReadError(0, trial.failure)
        return trial.n_bytes / (time.monotonic() - trial.started)


class _Trial:
    """Threads take ranges until the time is over."""

    def __init__(self, reader: SlabReader, ranges: Iterator[SlabRange], seconds: float) -> None:
        self.n_bytes = 0
        self.failure: str | None = None  # not the exception: it would keep views of the memory
        self.started = time.monotonic()
        self._reader = reader
        self._ranges = ranges
        self._seconds = seconds
        self._lock = threading.Lock()

    def read(self, window_start: int) -> None:
        """Life of one thread, which owns the window that starts there."""
        while time.monotonic() - self.started < self._seconds and self.failure is None:
            with self._lock:
                found = next(self._ranges, None)
            if found is None:
                return
            head = found.offset % ALIGNMENT
            wanted = ReadRange(found.file, found.offset, found.n_bytes, window_start + head)
            try:
                self._reader.read(wanted)
            except ReadError as error:
                self.failure = str(error)
                return
            with self._lock:
                self.n_bytes += found.n_bytes


def _cold_ranges(files: Sequence[ModelFile], slabs: SlabTable) -> Iterator[SlabRange]:
    """Ranges of experts in an order that is new each time, less those in the page cache."""
    keys = [(layer, expert) for layer in slabs.layers for expert in range(slabs.n_experts)]
    random.shuffle(keys)
    for layer, expert in keys:
        for found in layer.reads(expert):
            if not cached_bytes(files[found.file].fd, found.offset, found.n_bytes):
                yield found
