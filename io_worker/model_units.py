"""A model as the units that have checksums: dense tensors, then slabs. The same for both layouts.

Units are read in pieces, past the page cache where that works, so a unit of any size takes a small
window of memory. A checksum covers the bytes of the tensors only: it does not depend on where they
lie, and one list of checksums fits a plain file and the packed one that was made of it.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from io_worker.model_file import Model
from io_worker.packed_layout import checksum_of
from io_worker.reader import ModelFile
from io_worker.slab_reader import SlabReader
from io_worker.slabs import SlabRange, SlabTable
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, window_bytes

PIECE_BYTES = 4 << 20  # beyond, larger reads are no faster
N_THREADS = 3  # one reads while two compute checksums, which is what takes the time

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Unit:
    """One dense tensor or one slab, and where its bytes lie."""

    label: str
    ranges: tuple[SlabRange, ...]

    @property
    def n_bytes(self) -> int:
        """Of all ranges."""
        return sum(found.n_bytes for found in self.ranges)


def units_of(model: Model, slabs: SlabTable) -> list[Unit]:
    """Dense tensors in header order, then slabs by layer and expert."""
    joined = {(part.file, part.offset) for x in slabs.layers for part in (x.gate, x.up, x.down)}
    units = [
        Unit(found.name, (SlabRange(found.file, found.offset, found.n_bytes),))
        for found in model.tensors.values()
        if (found.file, found.offset) not in joined
    ]
    for layer in slabs.layers:
        for expert in range(slabs.n_experts):
            units.append(Unit(f"layer {layer.layer} expert {expert}", layer.ranges(expert)))
    return units


class UnitReader:
    """Reads pieces of units through a window of its own. For one thread."""

    def __init__(self, files: Sequence[ModelFile]) -> None:
        self._memory = mmap.mmap(-1, window_bytes(PIECE_BYTES))
        self._view = memoryview(self._memory)
        self._reader = SlabReader(files, self._view, "direct", drop_cache=True)

    def pieces(self, unit: Unit) -> Iterator[tuple[int, int, memoryview]]:
        """Number of the range, offset in it, bytes: all of a unit, in order. Raises `ReadError`.

        A piece is valid until the next one is asked for.
        """
        for index, found in enumerate(unit.ranges):
            for start in range(0, found.n_bytes, PIECE_BYTES):
                n_bytes = min(PIECE_BYTES, found.n_bytes - start)
                offset = found.offset + start
                head = offset % ALIGNMENT
                self._reader.read(ReadRange(found.file, offset, n_bytes, head))
                yield index, start, self._view[head : head + n_bytes]

    def checksum(self, unit: Unit) -> int:
        """Of one unit; raises `ReadError`."""
        return checksum_of(piece for _, _, piece in self.pieces(unit))

    def close(self) -> None:
        """Give the window back."""
        self._view.release()
        self._memory.close()


class UnitThreads:
    """Does one job for many units on a few threads. Use as a context manager."""

    def __init__(self, files: Sequence[ModelFile], n_threads: int = N_THREADS) -> None:
        self._readers: SimpleQueue[UnitReader] = SimpleQueue()
        for _ in range(n_threads):
            self._readers.put(UnitReader(files))
        self._threads = ThreadPoolExecutor(n_threads)

    def __enter__(self) -> "UnitThreads":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._readers.empty():
            self._readers.get().close()

    def each(self, job: Callable[[UnitReader, int], Result], places: range) -> list[Result]:
        """The results for units by their places, in order; raises what a job raised first."""

        def work(place: int) -> Result:
            reader = self._readers.get()
            try:
                return job(reader, place)
            finally:
                self._readers.put(reader)

        return list(self._threads.map(work, places))


def batches(units: Sequence[Unit], start: int, n_bytes: int) -> Iterator[range]:
    """Places of consecutive units from `start` on that come to so many bytes, one at least."""
    sum_bytes = 0
    for place in range(start, len(units)):
        if place > start and sum_bytes + units[place].n_bytes > n_bytes:
            yield range(start, place)
            start, sum_bytes = place, 0
        sum_bytes += units[place].n_bytes
    if start < len(units):
        yield range(start, len(units))
