"""Where granted experts lie: a region and three offsets become addresses for the kernels.

Region 0 is the pool, 1..n are the mapped model files (see `shm.mapped_files`). A pool location is
checked against its slot's header: the grant is the signal, the header only tells that something
wrote where it must not.
"""

from collections.abc import Sequence

import numpy as np

from compute_worker.matrix import Addresses
from shm.mapped_files import MappedFiles
from shm.messages import Location
from shm.pool import PoolMapping, header_words


class Regions:
    """The memory of one run that holds experts; it stays mapped as long as this lives."""

    def __init__(self, pool: PoolMapping | None, files: MappedFiles | None) -> None:
        self._pool = pool
        self._files = files  # keeps it alive
        pool_address = 0 if pool is None else _address_of(pool.view)
        file_addresses = [files.address + start for start in files.starts[:-1]] if files else []
        self._bases = (pool_address, *file_addresses)

    def copy(self, location: Location, parts: tuple[memoryview, memoryview, memoryview]) -> None:
        """Fill `parts` with gate, up and down of an expert in the pool. Raises `OSError`."""
        assert self._pool is not None and location.region == 0
        for start, part in zip((location.gate, location.up, location.down), parts, strict=True):
            self._pool.copy(start, part)

    def is_intact(self, layer: int, location: Location) -> bool:
        """Whether the slot's header says that it holds this expert of the layer."""
        if location.region != 0:
            return True
        assert self._pool is not None, location
        lease = location.lease
        return self._pool.holds(lease.slot, lease.generation, layer, location.expert)

    def addresses(self, location: Location) -> tuple[int, int, int]:
        """Of gate, up and down of an expert."""
        base = self._bases[location.region]
        return (base + location.gate, base + location.up, base + location.down)

    def table(self, locations: Sequence[Location]) -> Addresses:
        """The same of several experts (n, 3), for a kernel."""
        return np.array([self.addresses(each) for each in locations], np.uint64)

    def entries(self, layer: int, locations: Sequence[Location]) -> Addresses:
        """The same (n, 6) with the header of the slot as their mark: see `KnownExperts`."""
        rows = [(*self.addresses(each), *self._mark(layer, each)) for each in locations]
        return np.array(rows, np.uint64)

    def _mark(self, layer: int, location: Location) -> tuple[int, int, int]:
        if location.region != 0:
            return 0, 0, 0
        assert self._pool is not None, location
        lease = location.lease
        content = (lease.generation, layer, location.expert)
        return (self._bases[0] + self._pool.header_start(lease.slot), *header_words(*content))


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
