"""The slot table: every transition, and random sequences against a plain model."""

import itertools
import random

import pytest

from coordinator.core.slots import _LEGAL, Slot, SlotError, SlotState, SlotTable
from shm.messages import SlotLease

EVENTS = ("lease", "ready", "fail", "condemn", "lease again", "drop", "retire", "adopt", "keep")


def perform(table: SlotTable, slot: Slot, event: str, key: tuple[int, int] = (9, 9)) -> None:
    match event:
        case "lease":
            table.lease(slot, key)
        case "lease again":
            table.lease_again(slot)
        case _:
            getattr(table, event)(slot)


def slot_in(state: SlotState) -> tuple[SlotTable, Slot]:
    """A table of two slots, the first in a state."""
    table = SlotTable([0, 0])
    slot = table.slots[0]
    ways = {
        SlotState.FREE: (),
        SlotState.LOADING: ("lease",),
        SlotState.READY: ("lease", "ready"),
        SlotState.CONDEMNED: ("lease", "condemn"),
        SlotState.RETIRED: ("retire",),
        SlotState.ADOPTED: ("lease", "ready", "adopt"),
    }
    for event in ways[state]:
        perform(table, slot, event, (0, 0))
    table.check()
    return table, slot


@pytest.mark.parametrize(("state", "event"), [*itertools.product(SlotState, EVENTS)])
def test_what_is_not_in_the_table_raises(state: SlotState, event: str) -> None:
    table, slot = slot_in(state)
    assert slot.state is state
    legal = _LEGAL.get((state, event))
    if legal is None:
        with pytest.raises(SlotError) as caught:
            perform(table, slot, event)
        assert "slot 0" in str(caught.value)
        assert state.value in str(caught.value)
        assert slot.state is state
    else:
        perform(table, slot, event)
        assert slot.state is legal
    table.check()


def test_every_lease_raises_the_generation() -> None:
    table, slot = slot_in(SlotState.READY)
    first = slot.lease
    assert table.current(first) is slot
    assert table.lease(slot, (1, 1)) == (0, 0)  # who was evicted
    assert slot.lease.generation == first.generation + 1
    assert table.current(first) is None
    table.condemn(slot)
    table.lease_again(slot)
    assert slot.lease.generation == first.generation + 2
    assert slot.key == (1, 1)


@pytest.mark.parametrize("lease", [SlotLease(2, 0), SlotLease(2**62, 0), SlotLease(0, 77)])
def test_a_foreign_lease_has_no_slot(lease: SlotLease) -> None:
    assert SlotTable([0, 0]).current(lease) is None


def test_a_slot_in_use_is_neither_written_nor_dropped() -> None:
    table, slot = slot_in(SlotState.READY)
    table.pin(slot)
    for event in ("lease", "drop"):
        with pytest.raises(SlotError, match="pinned"):
            perform(table, slot, event)
    table.unpin(slot)
    with pytest.raises(SlotError, match="without a grant"):
        table.unpin(slot)
    table.drop(slot)
    table.check()


def test_a_condemned_slot_keeps_its_pins() -> None:
    """The step that waits for it goes on when another worker has filled it."""
    table, slot = slot_in(SlotState.LOADING)
    table.pin(slot)
    table.condemn(slot)
    table.lease_again(slot)
    assert slot.pins == 1
    table.check()


def test_retired_slots_come_back_last_first() -> None:
    table = SlotTable([0, 0, 1])
    for number in (1, 0):
        table.retire(table.slots[number])
    assert (table.n_free(0), table.n_free(1)) == (0, 1)
    assert [table.restore(0).number for _ in range(2)] == [0, 1]
    table.check()
    assert table.n_free(0) == 2


def test_free_slots_by_class() -> None:
    table = SlotTable([0, 1, 0, 1])
    first = table.take_free(1)
    assert first is table.slots[1]
    table.lease(first, (0, 0))
    assert table.take_free(1) is table.slots[3]
    assert (table.n_free(0), table.n_free(1)) == (2, 1)
    table.lease(table.slots[3], (0, 1))
    assert table.take_free(1) is None
    assert table.n_of_layer(0) == 2
    assert SlotTable([]).slots == []


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_against_a_plain_model(seed: int) -> None:
    """The model: state and key of each slot, told by the table of transitions alone."""
    rng = random.Random(seed)
    classes = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
    table = SlotTable(classes)
    states = [SlotState.FREE] * len(classes)
    keys: list[tuple[int, int] | None] = [None] * len(classes)
    unused = itertools.count()
    for _ in range(400):
        retired = [s for s in table.slots if states[s.number] is SlotState.RETIRED]
        if retired and rng.random() < 0.1:
            restored = table.restore(rng.choice(retired).slot_class)
            assert states[restored.number] is SlotState.RETIRED
            states[restored.number] = SlotState.FREE
        slot = rng.choice(table.slots)
        event = rng.choice(EVENTS)
        key = (rng.randrange(3), next(unused))
        state = states[slot.number]
        new = _LEGAL.get((state, event))
        if new is None:
            with pytest.raises(SlotError):
                perform(table, slot, event, key)
        else:
            perform(table, slot, event, key)
            states[slot.number] = new
            if event == "lease":
                keys[slot.number] = key
            elif new in (SlotState.FREE, SlotState.RETIRED):
                keys[slot.number] = None
        table.check()
        assert [s.state for s in table.slots] == states
        assert [s.key for s in table.slots] == keys
        for slot_class in range(3):
            free = [
                number
                for number, found in enumerate(states)
                if found is SlotState.FREE and classes[number] == slot_class
            ]
            assert table.n_free(slot_class) == len(free) if slot_class in classes else True
        for slot, found_key in zip(table.slots, keys, strict=True):
            if found_key is not None:
                assert table.find(found_key) is slot
