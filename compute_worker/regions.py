"""Where granted experts lie: a region and three offsets become addresses for the kernels.

Region 0 is the pool, 1..n are the mapped model files (see `shm.mapped_files`). A pool location is
checked against its slot's header: the grant is the signal, the header only tells a fault of ours.
"""

import numpy as np

from shm.mapped_files import MappedFiles
from shm.messages import Location
from shm.pool import PoolMapping


class SlotMismatch(Exception):
    """A granted slot does not hold what the grant says: a fault of ours."""


class Regions:
    """The memory of one run that holds experts; it stays mapped as long as this lives."""

    def __init__(self, pool: PoolMapping | None, files: MappedFiles | None) -> None:
        self._pool = pool
        self._files = files  # keeps it alive
        pool_address = 0 if pool is None else _address_of(pool.view)
        file_addresses = [files.address + start for start in files.starts[:-1]] if files else []
        self._bases = (pool_address, *file_addresses)

    def addresses(self, layer: int, location: Location) -> tuple[int, int, int]:
        """Of gate, up and down of a layer's expert; raises `SlotMismatch`."""
        lease = location.lease
        if location.region == 0 and not (
            self._pool and self._pool.holds(lease.slot, lease.generation, layer, location.expert)
        ):
            raise SlotMismatch(
                f"slot {lease.slot}: expected generation {lease.generation} with layer {layer}, "
                f"expert {location.expert}; its header says something else"
            )
        base = self._bases[location.region]
        return (base + location.gate, base + location.up, base + location.down)


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
