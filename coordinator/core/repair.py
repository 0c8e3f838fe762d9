"""Slots that something wrote over: which are filled again, and when that is given up.

Part of the decision core. Found by compute, by the slot's header, before it computes with the slot:
a stray write of any process can do it, and what it hit beside the header nobody knows. So the slot
counts as empty, keeps its key and its pins, and is read anew; the layer that wants it waits.
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
