"""Grants: telling compute where experts lie, once per layer and read, or once for good.

Part of the decision core. A layer stands when its class has a slot for every expert and all are
there: nothing of it is ever evicted, so it is granted as a whole once and needs no message after.
"""

from collections.abc import Sequence, Set

from coordinator.core.geometry import PoolGeometry
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Key, Slot, SlotState, SlotTable
from shm.messages import Grant, Location, ReadSpan


class Grants:
    """Locations of what is ready, which layers stand, and which would if they were whole."""

    def __init__(
        self, geometry: PoolGeometry, slots: SlotTable, *, standing: bool, lasting: bool
    ) -> None:
        self._geometry = geometry
        self._slots = slots
        self._locations: dict[int, Location] = {}  # by slot: a hit costs a look-up
        self.standing: set[int] = set()
        self.may_stand: set[int] = set()
        self._stands_when_whole = standing
        self._lasts = lasting
        self.resize(geometry.slots_of_class, set())

    def note_ready(self, slot: Slot) -> None:
        """A slab lies in its slot now, or will."""
        known = self._locations.get(slot.number)
        if known is None or known.lease != slot.lease:
            self._locations[slot.number] = self._geometry.location(slot)

    def first(
        self, served: ServedLayer, hits: list[Slot], on_the_way: list[Slot], gone: tuple[Key, ...]
    ) -> Grant:
        """The answer to a `Need`: its hits and what is on its way to it, or the whole layer if it
        stands from now on; with it who is `gone`."""
        layer, step = served.need.layer, served.need.step
        found = self._whole(layer)
        if found is not None:
            self.standing.add(layer)
            return found._replace(evicted=gone)
        self.standing.discard(layer)  # it stood, but compute could not keep that: a slot was lost
        for slot in on_the_way:
            self.note_ready(slot)  # it lies where it will lie
        unknown = [slot for slot in hits if slot.key and slot.key[1] not in served.need.known]
        found_there, coming = self.locations_of(unknown), self.locations_of(on_the_way)
        # in waves one expert follows another into its slot: none of them is there for long
        lasts = self._lasts and not served.n_waiting
        return Grant(layer, found_there, (), served.n_waiting, False, step, coming, lasts, gone)

    def stand(self, layer: int) -> Grant | None:
        """The standing grant of a layer that may stand from now on and did not before."""
        found = None if layer in self.standing else self._whole(layer)
        if found is not None:
            self.standing.add(layer)
        return found

    def _whole(self, layer: int) -> Grant | None:
        """A layer with all its experts, where it may stand."""
        if layer not in self.may_stand:
            return None
        whole = [self._slots.find((layer, e)) for e in range(self._geometry.n_experts)]
        ready = [slot for slot in whole if slot and slot.state is SlotState.READY]
        if len(ready) < self._geometry.n_experts:
            return None
        return Grant(layer, self.locations_of(ready), (), 0, True)

    def of_read(self, served: ServedLayer, slot: Slot, span: ReadSpan) -> Grant:
        """One expert that a layer waited for."""
        layer, step = served.need.layer, served.need.step
        return Grant(layer, self.locations_of([slot]), (span,), served.n_waiting, False, step)

    def resize(self, slots_of_class: Sequence[int], stays: Set[int]) -> tuple[int, ...]:
        """Classes have so many slots from now on; returns the layers whose standing grant ends.

        Those that `stays` go on standing wherever they are.
        """
        whole = self._geometry.whole_layers(slots_of_class)
        self.may_stand = whole if self._stands_when_whole else set()
        gone = self.standing - self.may_stand - stays
        self.standing -= gone
        return tuple(sorted(gone))

    def lacking(self) -> list[Key]:
        """Experts that layers miss so that they could stand."""
        return [
            (layer, expert)
            for layer in sorted(self.may_stand - self.standing)
            for expert in range(self._geometry.n_experts)
            if self._slots.find((layer, expert)) is None
        ]

    def forget_standing(self) -> None:
        """Compute is gone, and what it was granted with it."""
        self.standing.clear()

    def locations_of(self, slots: list[Slot]) -> tuple[Location, ...]:
        """Where ready slots lie."""
        return tuple([self._locations[slot.number] for slot in slots])
