"""Experts in memory of this process: a mapping per layer, with huge pages, filled part by part.

    mapping (MAP_PRIVATE | MAP_ANONYMOUS) of one layer, from a huge page's boundary on:
    | expert 0: gate, up, down, each padded to 64 | expert 1 | …

What is not filled yet takes no memory, and what is dropped goes back to the system at once. Huge
pages are asked for only where they fit wholly into the layer, so that no more is taken than that.
Who adopts what, and when, is the coordinator's business.
"""

import errno
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compute_worker.locked import lock_when_filled
from compute_worker.regions import Regions
from io_worker.slabs import LayerSlabs, SlabTable
from shm.messages import Location

HUGE_PAGE_BYTES = 2 << 20
MATRIX_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True, slots=True)
class _Layer:
    mapping: mmap.mmap
    start: int  # of the first huge page, in the mapping
    address: int  # of that byte
    range_bytes: tuple[int, int, int]

    @property
    def places(self) -> tuple[int, int, int]:
        """Of gate, up and down in an expert."""
        gate, up, _ = map(_padded, self.range_bytes)
        return 0, gate, gate + up

    @property
    def expert_bytes(self) -> int:
        """From one expert to the next."""
        return sum(map(_padded, self.range_bytes))


class OwnMemory:
    """Copies of experts, by layer. `locks`: keep them out of swap."""

    def __init__(self, regions: Regions, slabs: SlabTable, *, locks: bool) -> None:
        self._regions = regions
        self._slabs = {layer.layer: layer for layer in slabs.layers}
        self._n_experts = slabs.n_experts
        self._locks = locks
        self._layers: dict[int, _Layer] = {}

    def adopt(self, number: int, locations: Sequence[Location]) -> list[tuple[int, int, int]]:
        """Copy experts of a layer from the pool; returns the addresses of gate, up and down of
        each, valid until the layer is dropped. Raises `OSError` where there is no memory."""
        layer = self._layers.get(number)
        if layer is None:
            layer = _map_layer(self._slabs[number], self._n_experts)
            self._layers[number] = layer
            if self._locks:  # as a whole: a huge page cannot be half of it locked
                lock_when_filled(layer.address, self._n_experts * layer.expert_bytes)
        addresses = []
        with memoryview(layer.mapping) as whole:
            for location in locations:
                first = location.expert * layer.expert_bytes
                gate, up, down = (layer.start + first + place for place in layer.places)
                sizes = layer.range_bytes
                with (
                    whole[gate : gate + sizes[0]] as gate_bytes,
                    whole[up : up + sizes[1]] as up_bytes,
                    whole[down : down + sizes[2]] as down_bytes,
                ):
                    self._regions.copy(location, (gate_bytes, up_bytes, down_bytes))
                base = layer.address + first
                addresses.append((base, base + layer.places[1], base + layer.places[2]))
        return addresses

    def drop(self, number: int) -> None:
        """Give the memory of a layer back, if it has any. Nothing may use it any more."""
        layer = self._layers.pop(number, None)
        if layer is not None:
            layer.mapping.close()


def _map_layer(slabs: LayerSlabs, n_experts: int) -> _Layer:
    n_bytes = n_experts * sum(map(_padded, slabs.range_bytes))
    mapping = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])
    start = -address % HUGE_PAGE_BYTES
    n_huge_bytes = n_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if n_huge_bytes:
        _advise(mapping, mmap.MADV_HUGEPAGE, start, n_huge_bytes)
    rest = start + n_huge_bytes
    _advise(mapping, mmap.MADV_NOHUGEPAGE, rest, len(mapping) - rest)
    return _Layer(mapping, start, address + start, slabs.range_bytes)


def _advise(mapping: mmap.mmap, advice: int, start: int, n_bytes: int) -> None:
    try:
        mapping.madvise(advice, start, n_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without transparent huge pages
            raise


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
