"""Slots whose content is lost: which are filled again, and when a step is given up.

Part of the decision core. Compute finds by a slot's header that something wrote over it, before it
computes with the slot: a stray write of any process can do it, and what it hit beside the header
nobody knows. So the slot counts as empty, keeps its key and its pins, and is read anew; the layer
that wants it waits.
"""

from coordinator.core.actions import Action, RequestsFailed, ToCompute
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Slot, SlotState, SlotTable
from shm.messages import Abort, SlotsLost

MAX_TIMES = 3  # that an expert of one layer is read again: then somebody writes all the time


def read_again(lost: SlotsLost, slots: SlotTable, layer: ServedLayer | None) -> list[Slot]:
    """Lease the lost slots again, those that still hold what they held, and have the layer wait for
    those of its own experts; returns them."""
    again = []
    for lease in lost.lost:
        slot = slots.current(lease)
        if slot is None or slot.state is not SlotState.READY or slot.key is None:
            continue
        slots.lease_again(slot)
        again.append(slot)
        number, expert = slot.key
        if layer and layer.need.layer == number and layer.needs(expert):
            if not slot.pins:  # a standing grant pins nothing
                slots.pin(slot)
            layer.missing.add(expert)
            layer.times_lost[expert] += 1
    return again


def given_up(layer: ServedLayer | None) -> list[Action]:
    """End the step of a layer that loses an expert again and again."""
    if layer is None or max(layer.times_lost.values(), default=0) <= MAX_TIMES:
        return []
    number, step = layer.need.layer, layer.need.step
    text = f"layer {number}: something writes over slots of the pool all the time; start again"
    return [RequestsFailed(text), ToCompute(Abort(step))]


def gone_in_use(slots: SlotTable, layer: ServedLayer) -> list[Action]:
    """End the step of a layer that is computed with experts whose slots are free: their reader died
    after it had told compute, nobody could read them again, and the layer's `Need` was under way
    when compute was told. Nothing may be read into these slots before compute has stopped."""
    number, step = layer.need.layer, layer.need.step
    gone = [expert for expert in layer.need.known if slots.find((number, expert)) is None]
    if not gone:
        return []
    text = f"layer {number}, expert {gone[0]}: its reader died, and it could not be read again"
    return [RequestsFailed(text), ToCompute(Abort(step))]
