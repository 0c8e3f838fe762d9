"""Layers whose experts all stand: granted once, used without asking until they are revoked.

They lie in the pool, or in memory of this process's own once it was told to adopt them. Their
places change only while no kernel runs. This module does not know when that is. Slots of the pool
were looked at when they were granted, and are not again.
"""

import numpy as np

from compute_worker.known_experts import KnownExperts
from compute_worker.matrix import Addresses
from compute_worker.own_memory import OwnMemory
from shm.messages import Adopt, Adopted, Dropped


class StandingLayers:
    """Their numbers. Where their experts lie is in `known`, to which others write for other
    layers."""

    def __init__(self, known: KnownExperts, own: OwnMemory) -> None:
        self._known = known
        self._own = own
        self._layers: set[int] = set()

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def add(self, layer: int, addresses: Addresses) -> None:
        """A layer stands; addresses (E, 3)."""
        self._known.add(layer, range(len(addresses)), addresses)
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
        self._known.add(adopt.layer, experts, np.array(addresses, np.uint64))
        return Adopted(adopt.layer, True)

    def revoke(self, layers: tuple[int, ...]) -> Dropped:
        """These layers stand no more, and copies of them are given back."""
        for layer in layers:
            if layer in self._layers:
                self._layers.remove(layer)
                self._known.forget_layer(layer)
            self._own.drop(layer)
        return Dropped(layers)
