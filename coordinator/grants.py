"""Grants: telling compute where experts lie, once per layer and read, or once for good.

Part of the decision core. A layer stands when its class has a slot for every expert and all are
there: nothing of it is ever evicted, so it is granted as a whole once and needs no message after.
"""

from collections.abc import Sequence

from coordinator.geometry import PoolGeometry
from coordinator.slots import Key, Slot, SlotState, SlotTable
from shm.messages import Grant, Location, ReadSpan


class Grants:
    """Locations of what is ready, and which layers stand."""

    def __init__(self, geometry: PoolGeometry, slots: SlotTable, *, standing: bool) -> None:
        self._geometry = geometry
        self._slots = slots
        self._locations: dict[int, Location] = {}  # by slot: a hit costs a look-up
        self._standing: set[int] = set()
        self._stands_when_whole = standing
        self._may_stand: set[int] = set()
        self.resize(geometry.slots_of_class)

    def note_ready(self, slot: Slot) -> None:
        """A slab lies in its slot now."""
        self._locations[slot.number] = self._geometry.location(slot)

    def first(self, layer: int, hits: list[Slot], n_waiting: int) -> Grant:
        """The answer to a `Need`: its hits, or the whole layer if it stands from now on."""
        if layer in self._may_stand:
            whole = [self._slots.find((layer, e)) for e in range(self._geometry.n_experts)]
            ready = [slot for slot in whole if slot and slot.state is SlotState.READY]
            if len(ready) == self._geometry.n_experts:
                self._standing.add(layer)
                return Grant(layer, self._locations_of(ready), (), 0, True)
        self._standing.discard(layer)  # it stood, but compute could not keep that: a slot was lost
        return Grant(layer, self._locations_of(hits), (), n_waiting, False)

    def of_read(self, layer: int, slot: Slot, span: ReadSpan, n_waiting: int) -> Grant:
        """One expert that a layer waited for."""
        return Grant(layer, self._locations_of([slot]), (span,), n_waiting, False)

    def resize(self, slots_of_class: Sequence[int]) -> tuple[int, ...]:
        """Classes have so many slots from now on; returns the layers whose standing grant ends."""
        whole = self._geometry.whole_layers(slots_of_class)
        self._may_stand = whole if self._stands_when_whole else set()
        gone = self._standing - self._may_stand
        self._standing -= gone
        return tuple(sorted(gone))

    def lacking(self) -> list[Key]:
        """Experts that layers miss so that they could stand."""
        return [
            (layer, expert)
            for layer in sorted(self._may_stand - self._standing)
            for expert in range(self._geometry.n_experts)
            if self._slots.find((layer, expert)) is None
        ]

    def forget_standing(self) -> None:
        """Compute is gone, and what it was granted with it."""
        self._standing.clear()

    def _locations_of(self, slots: list[Slot]) -> tuple[Location, ...]:
        return tuple([self._locations[slot.number] for slot in slots])
