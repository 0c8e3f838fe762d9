"""What compute gives back: whose slots come free, and which expert of the layer follows into them.

Part of the decision core.
"""

from collections.abc import Iterable

from coordinator.core.geometry import ExpertCounters, PoolGeometry
from coordinator.core.noticed import note_used
from coordinator.core.placement import Placement
from coordinator.core.reads import ReadDispatch
from coordinator.core.seating import UNDER_WAY
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Slot
from shm.messages import SlotLease


class Returns:
    """Unpins slots, and queues the reads that waited for them."""

    def __init__(
        self,
        geometry: PoolGeometry,
        placement: Placement,
        reads: ReadDispatch,
        counters: ExpertCounters,
    ) -> None:
        self._geometry = geometry
        self._placement = placement
        self._slots = placement.slots
        self._reads = reads
        self._counters = counters

    def take(self, released: Iterable[SlotLease], layer: ServedLayer | None) -> None:
        """Compute is done with these."""
        for lease in released:
            slot = self._slots.holder(lease)
            # else its step was aborted since, or who goes wrong gives it back a second time
            if slot is not None and slot.pins:
                if slot.lease == lease:
                    note_used(slot, self._slots, self._reads, layer, self._counters)
                self._slots.unpin(slot)
                self.hand_over(slot, layer)

    def hand_over(self, slot: Slot, layer: ServedLayer | None) -> None:
        """Fill a slot that came free with the expert that waits for it, if one does."""
        is_free = slot.pins == 0 and slot.state not in UNDER_WAY
        expert = layer.next_into(slot) if layer and is_free else None
        if layer and expert is not None:
            self._placement.take_over(slot, (layer.need.layer, expert))
            self._slots.pin(slot)
            self._reads.push([self._geometry.read_of(slot)])
