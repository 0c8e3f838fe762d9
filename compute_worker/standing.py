"""Layers whose experts all stand: granted once, used without asking until they are revoked.

They lie in the pool, or in memory of this process's own once it was told to adopt them. Their
places change only while no kernel runs. This module does not know when that is.
"""

from collections.abc import Sequence

import numpy as np

from compute_worker.matrix import Addresses
from compute_worker.own_memory import OwnMemory
from io_worker.slabs import SlabTable
from shm.messages import Adopt, Adopted, Dropped


class StandingLayers:
    """Addresses (L, E, 3) of gate, up and down; of other layers they mean nothing."""

    def __init__(self, slabs: SlabTable, own: OwnMemory) -> None:
        self._own = own
        self._layers: set[int] = set()
        self._addresses = np.zeros((len(slabs.layers), slabs.n_experts, 3), np.uint64)

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def of_all(self, layers: range) -> Addresses | None:
        """All addresses, where each of these layers stands."""
        return self._addresses if self._layers.issuperset(layers) else None

    def of(self, layer: int, experts: Sequence[int]) -> Addresses:
        """Those of some experts (n, 3) of a layer that stands."""
        there: Addresses = self._addresses[layer, experts]
        return there

    def add(self, layer: int, addresses: Addresses) -> None:
        """A layer stands; (E, 3)."""
        self._addresses[layer] = addresses
        self._layers.add(layer)

    def adopt(self, adopt: Adopt) -> Adopted:
        """Copy experts of a layer that stands, and use the copies from now on."""
        if adopt.layer not in self._layers:  # a slot of it was lost
            return Adopted(adopt.layer, False)
        try:
            addresses = self._own.adopt(adopt.layer, adopt.locations)
        except (OSError, MemoryError):  # they stay in the pool
            return Adopted(adopt.layer, False)
        experts = [location.expert for location in adopt.locations]
        self._addresses[adopt.layer, experts] = np.array(addresses, np.uint64)
        return Adopted(adopt.layer, True)

    def revoke(self, layers: tuple[int, ...]) -> Dropped:
        """These layers stand no more, and copies of them are given back."""
        for layer in layers:
            self._layers.discard(layer)
            self._own.drop(layer)
        return Dropped(layers)
