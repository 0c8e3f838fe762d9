"""Gives the experts of a layer their slots, all at once, when its `Need` is handled.

Part of the decision core. Which slot a single expert gets is `Placement`'s business; here is the
order among those of a layer: what cannot have a slot now will follow another into its own.
"""

from collections.abc import Callable, Sequence

from coordinator.core.geometry import PoolGeometry
from coordinator.core.placement import Placement
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Slot, SlotState, SlotTable
from shm.messages import ExpertUse

UNDER_WAY = (SlotState.LOADING, SlotState.CONDEMNED)


def find_seated(
    slots: SlotTable, layer: ServedLayer, uses: Sequence[ExpertUse]
) -> tuple[list[Slot], list[ExpertUse]]:
    """Pin what is resident (returned first) or on its way; all but the resident are misses."""
    hits, misses = [], []
    for use in uses:
        slot = slots.find((layer.need.layer, use.expert))
        if slot is None:
            misses.append(use)
            continue
        slots.pin(slot)
        if slot.state is SlotState.READY:
            hits.append(slot)
        else:  # a read that began before this need
            misses.append(use)
            layer.missing.add(use.expert)
    return hits, misses


def seat_layer(
    placement: Placement,
    geometry: PoolGeometry,
    layer: ServedLayer,
    hits: list[Slot],
    misses: Sequence[ExpertUse],
    now: int,
    *,
    whole_layers: bool,
) -> list[Slot]:
    """Lease slots for all that has to be read; returns those to be filled now, pinned. With
    `whole_layers` a miss brings all experts of its layer."""
    slot_class = geometry.class_of_layer[layer.need.layer]
    loading = _seat(placement, layer, slot_class, hits, misses, now)
    if whole_layers and loading and not layer.n_waiting:
        loading += _seat_rest(placement, layer, geometry.n_experts, now)
    return loading


def waited_for(slots: SlotTable, layer: ServedLayer) -> Callable[[], set[int]]:
    """Tells the numbers of the slots whose reads the layer waits for: to use what they bring, or to
    have the slot after that."""

    def numbers() -> set[int]:
        found = [slots.find((layer.need.layer, expert)) for expert in layer.missing | layer.rest]
        return {slot.number for slot in found if slot is not None} | layer.takes_over.keys()

    return numbers


def _seat(
    placement: Placement,
    layer: ServedLayer,
    slot_class: int,
    hits: list[Slot],
    misses: Sequence[ExpertUse],
    now: int,
) -> list[Slot]:
    """Lease a slot for every miss that can have one now; queue the others behind a slot.

    Returns the slots to be filled, pinned. What `layer.missing` has already is on its way.
    """
    number, slots = layer.need.layer, placement.slots
    under_way = [slots.find((number, expert)) for expert in sorted(layer.missing)]
    loading: list[Slot] = []
    waiting: list[int] = []
    for use in misses:
        if use.expert in layer.missing:
            continue
        key = (number, use.expert)
        slot = None
        if not waiting:
            slot = placement.room_for(key, is_prompt=layer.is_prompt)
        if slot is None:
            waiting.append(use.expert)
            continue
        loading.append(placement.lease(slot, key, now))
        slots.pin(slot)
        layer.missing.add(use.expert)
    holders = [*hits, *loading, *filter(None, under_way)]
    if waiting and not holders:
        # guesses or a step that was aborted have all slots of the class: their reads end without us
        holders = [
            slot
            for slot in slots.slots
            if slot.slot_class == slot_class and slot.state in UNDER_WAY
        ]
    layer.takes_over = placement.follow(number, waiting, holders, now)
    layer.n_waiting = len(waiting)
    return loading


def _seat_rest(placement: Placement, layer: ServedLayer, n_experts: int, now: int) -> list[Slot]:
    """Lease slots for the experts of the layer that nobody asked for, as far as slots go without
    pushing out others of the layer. Returns the slots to be filled."""
    number, loading = layer.need.layer, []
    for key in [(number, expert) for expert in range(n_experts)]:
        if placement.slots.find(key) is not None:
            continue
        slot = placement.room_for(key, is_prompt=layer.is_prompt)
        if slot is None or (slot.key is not None and slot.key[0] == number):
            break
        loading.append(placement.lease(slot, key, now))
        layer.rest.add(key[1])
    return loading
