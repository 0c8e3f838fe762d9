"""One model file, one pool and workers on both, for tests of I/O workers. No test by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from read_cases import content, opened, pattern, pool_of, slab_at, write_file
from worker_parent import WorkerParent

from io_worker.reader import ModelFile
from shm.messages import SlabRead
from shm.pool import PoolLayout, PoolMapping

FILE_BYTES = 500_003
DATA = pattern(FILE_BYTES)
SLAB_BYTES = 50_000
N_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """One open model file and one pool: what a worker needs."""

    path: Path
    file: ModelFile
    pool: PoolMapping
    pool_fd: int

    def slab(self, slot: int, generation: int = 1) -> SlabRead:
        offsets = (slot * 33, 200_000 + slot, FILE_BYTES - SLAB_BYTES - slot * 4096)
        return slab_at(self.pool, slot, offsets, SLAB_BYTES, generation)

    def worker(self, layout: PoolLayout | None = None, **changes: Any) -> WorkerParent:
        return WorkerParent([self.file], layout or self.pool.layout, self.pool_fd, **changes)

    def assert_right(self, read: SlabRead) -> None:
        for wanted in read.ranges:
            start = wanted.file_offset
            assert content(self.pool, wanted) == DATA[start : start + wanted.n_bytes]
        assert self.pool.holds(read.lease.slot, read.lease.generation, read.layer, read.expert)


@contextmanager
def stage_in(folder: Path) -> Iterator[Stage]:
    """A stage whose file lies in this folder."""
    path = write_file(folder / "model.gguf", DATA)
    with opened(path) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, pool_fd):
        yield Stage(path, file, pool, pool_fd)
