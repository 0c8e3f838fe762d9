"""What is heard of readers, here and, before that, by compute: slabs that are on their way, and are
there.

Part of the decision core. A grant tells compute where the experts that are being read will lie, and
their readers tell it when they do (`shm.notices`): so compute may give back a slot whose reader has
not answered here yet. That is when the slot counts as filled, not when the answer comes: victims
depend on the sequence of `Need`s alone.
"""

from coordinator.core.geometry import ExpertCounters
from coordinator.core.reads import ReadDispatch
from coordinator.core.seating import UNDER_WAY
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Slot, SlotState, SlotTable
from shm.messages import SlotLease


def coming(slots: SlotTable, reads: ReadDispatch, layer: ServedLayer) -> list[Slot]:
    """Slots that experts of the layer are being read into, noted in `layer`; none where nothing
    counts before a whole layer is there. What a dying reader fills is filled again: not these."""
    if layer.rest:
        return []
    found = [slots.find((layer.need.layer, expert)) for expert in sorted(layer.missing)]
    loading = [slot for slot in found if slot and slot.state is SlotState.LOADING]
    there = [slot for slot in loading if reads.compute_hears_of(slot.lease)]
    layer.on_the_way = frozenset(slot.lease for slot in there)
    return there


def note_used(
    slot: Slot,
    slots: SlotTable,
    reads: ReadDispatch,
    layer: ServedLayer | None,
    counters: ExpertCounters,
) -> None:
    """Compute has what the slot is being filled with, so it is filled: a reader gives its notice
    when it is done with the slot, also one that is being killed since. It counts as read now: a
    run may be over, or its reader dead, before the answer comes."""
    if slot.state not in UNDER_WAY or slot.key is None:
        return
    counters.add_used(reads.used(slot.lease))
    slots.ready(slot)
    if layer and layer.need.layer == slot.key[0]:
        layer.missing.discard(slot.key[1])


def answered(
    slots: SlotTable,
    reads: ReadDispatch,
    name: str,
    lease: SlotLease,
    counters: ExpertCounters,
) -> Slot | None:
    """The slot of a reader's answer, or None when the answer is late, double or void."""
    slot = slots.current(lease)
    # a condemned reader's answer is void, and its read stays noted for whoever comes after it
    is_awaited = slot is not None and slot.state is SlotState.LOADING
    if not is_awaited or not reads.answered(name, lease):
        counters.stale_answers += 1
        return None
    return slot
