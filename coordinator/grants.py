"""Grants: telling compute where experts lie, once per layer and read, or once for good.

Part of the decision core. A layer stands when its class has a slot for every expert and all are
there: nothing of it is ever evicted, so it is granted as a whole once and needs no message after.
"""

from coordinator.geometry import PoolGeometry
from coordinator.slots import Slot, SlotState, SlotTable
from shm.messages import Grant, Location, ReadSpan


class Grants:
    """Locations of what is ready, and which layers stand."""

    def __init__(self, geometry: PoolGeometry, slots: SlotTable, *, standing: bool) -> None:
        self._geometry = geometry
        self._slots = slots
        self._locations: dict[int, Location] = {}  # by slot: a hit costs a look-up
        self._standing: set[int] = set()
        self._may_stand = {
            layer
            for layer, share in geometry.share_of_layers().items()
            if standing and share >= geometry.n_experts
        }

    def note_ready(self, slot: Slot) -> None:
        """A slab lies in its slot now."""
        self._locations[slot.number] = self._geometry.location(slot)

    def first(self, layer: int, hits: list[Slot], n_waiting: int) -> Grant:
        """The answer to a `Need`: its hits, or the whole layer if it stands from now on."""
        if layer in self._may_stand and layer not in self._standing:
            whole = [self._slots.find((layer, e)) for e in range(self._geometry.n_experts)]
            ready = [slot for slot in whole if slot and slot.state is SlotState.READY]
            if len(ready) == self._geometry.n_experts:
                self._standing.add(layer)
                return Grant(layer, self._locations_of(ready), (), 0, True)
        return Grant(layer, self._locations_of(hits), (), n_waiting, False)

    def of_read(self, layer: int, slot: Slot, span: ReadSpan, n_waiting: int) -> Grant:
        """One expert that a layer waited for."""
        return Grant(layer, self._locations_of([slot]), (span,), n_waiting, False)

    def revoke(self, layers: set[int]) -> tuple[int, ...]:
        """These layers may not stand any more; returns those that did."""
        gone = tuple(sorted(self._standing & layers))
        self._standing -= layers
        self._may_stand -= layers
        return gone

    def forget_standing(self) -> None:
        """Compute is gone, and what it was granted with it."""
        self._standing.clear()

    def _locations_of(self, slots: list[Slot]) -> tuple[Location, ...]:
        return tuple([self._locations[slot.number] for slot in slots])
