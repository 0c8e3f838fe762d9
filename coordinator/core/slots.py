"""The slot table: which expert lies in which slot, and in what state. Private to the coordinator.

    FREE --lease--> LOADING --ready--> READY --lease--> LOADING (evicts)
                       |                 +---drop---> FREE
                       +--fail----> FREE
                       +--condemn-> CONDEMNED --lease again--> LOADING   (its worker was reaped)
                                        +-------ready------> READY     (it had told compute before)
    READY --lease again--> LOADING                                       (something wrote over it)
    FREE --retire--> RETIRED --restore--> FREE                           (memory given back)
    READY --adopt--> ADOPTED --drop--> FREE           (compute has a copy of its own: `adoption`)
                        +------keep--> READY          (or has no memory for one)

A slot is written only while LOADING or CONDEMNED. CONDEMNED means that its worker was told to die
but may still write; only its confirmed death ends that, or its own word to compute that the slab is
whole, never a timeout: a generation stops a late answer, not a late write. Every lease raises the
generation.

This module knows neither policy nor messages.
"""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shm.messages import SlotLease

Key = tuple[int, int]  # (layer, expert)


class SlotState(enum.Enum):
    """State of one slot."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"
    CONDEMNED = "condemned"
    RETIRED = "retired"
    ADOPTED = "adopted"


RESIDENT = (SlotState.READY, SlotState.ADOPTED)
_LEGAL = {
    (SlotState.FREE, "lease"): SlotState.LOADING,
    (SlotState.READY, "lease"): SlotState.LOADING,
    (SlotState.CONDEMNED, "lease again"): SlotState.LOADING,
    (SlotState.READY, "lease again"): SlotState.LOADING,
    (SlotState.LOADING, "ready"): SlotState.READY,
    (SlotState.CONDEMNED, "ready"): SlotState.READY,
    (SlotState.LOADING, "fail"): SlotState.FREE,
    (SlotState.LOADING, "condemn"): SlotState.CONDEMNED,
    (SlotState.READY, "drop"): SlotState.FREE,
    (SlotState.READY, "adopt"): SlotState.ADOPTED,
    (SlotState.ADOPTED, "keep"): SlotState.READY,
    (SlotState.ADOPTED, "drop"): SlotState.FREE,
    (SlotState.FREE, "retire"): SlotState.RETIRED,
    (SlotState.RETIRED, "restore"): SlotState.FREE,
}


class SlotError(Exception):
    """A transition that the table does not allow: a fault of ours."""


@dataclass(slots=True)
class Slot:
    """One slot. `pins` counts the steps that use it now; a pinned slot is never written."""

    number: int
    slot_class: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    since: int = 0  # the generation from which on it is for this key
    key: Key | None = None
    pins: int = 0

    @property
    def lease(self) -> SlotLease:
        """What names this content in messages."""
        return SlotLease(self.number, self.generation)


class SlotTable:
    """All slots, and where each key is."""

    def __init__(self, class_of_slots: list[int]) -> None:
        self.slots = [Slot(number, slot_class) for number, slot_class in enumerate(class_of_slots)]
        self._of_key: dict[Key, Slot] = {}
        self._n_of_layer: Counter[int] = Counter()
        n_classes = max(class_of_slots, default=-1) + 1
        self._free: list[list[int]] = [[] for _ in range(n_classes)]
        self._retired: list[list[int]] = [[] for _ in range(n_classes)]
        self._n_of_class = Counter(class_of_slots)
        self._n_adopted: Counter[int] = Counter()  # by class
        self._n_pins = 0
        for slot in reversed(self.slots):
            self._free[slot.slot_class].append(slot.number)

    def find(self, key: Key) -> Slot | None:
        """The slot that holds the key or is being filled with it."""
        return self._of_key.get(key)

    def current(self, lease: SlotLease) -> Slot | None:
        """The slot of a lease, or None when its content has changed since."""
        if lease.slot >= len(self.slots):
            return None
        slot = self.slots[lease.slot]
        return slot if slot.generation == lease.generation else None

    def holder(self, lease: SlotLease) -> Slot | None:
        """The slot of a lease, also where it was filled again with the same key since."""
        if lease.slot >= len(self.slots):
            return None
        slot = self.slots[lease.slot]
        same = slot.key is not None and slot.since <= lease.generation <= slot.generation
        return slot if same else None

    def take_free(self, slot_class: int) -> Slot | None:
        """The free slot with the smallest number of a class, still free; None without one."""
        free = self._free[slot_class]
        return self.slots[free[-1]] if free else None

    def n_of_layer(self, layer: int) -> int:
        """Slots that hold experts of the layer or are being filled with them; not adopted ones."""
        return self._n_of_layer[layer]

    def n_free(self, slot_class: int) -> int:
        """Free slots of a class."""
        return len(self._free[slot_class])

    def usable_of_class(self) -> tuple[int, ...]:
        """Slots of each class that are not retired."""
        return tuple(self._n_of_class[c] - len(gone) for c, gone in enumerate(self._retired))

    def n_adopted(self, slot_class: int) -> int:
        """Slots of a class whose content compute has."""
        return self._n_adopted[slot_class]

    def lease(self, slot: Slot, key: Key) -> Key | None:
        """Begin to fill a slot with a key; returns the key that was evicted from it."""
        if slot.pins:
            raise SlotError(f"slot {slot.number}: lease for {key} while pinned {slot.pins} times")
        evicted = slot.key if slot.state is SlotState.READY else None
        self._move(slot, "lease")
        self._detach(slot)
        slot.key = key
        slot.generation += 1
        slot.since = slot.generation
        self._of_key[key] = slot
        self._n_of_layer[key[0]] += 1
        return evicted

    def lease_again(self, slot: Slot) -> None:
        """Fill a condemned or damaged slot with the same key anew; pins stay."""
        self._move(slot, "lease again")
        slot.generation += 1

    def ready(self, slot: Slot) -> None:
        """The slab lies in the slot."""
        self._move(slot, "ready")

    def condemn(self, slot: Slot) -> None:
        """The slot's worker will be killed; until it is reaped it may still write."""
        self._move(slot, "condemn")

    def fail(self, slot: Slot) -> None:
        """The slab could not be read: the slot is free, whoever waits for it is told elsewhere."""
        self._n_pins -= slot.pins
        slot.pins = 0
        self._clear(slot, "fail")

    def drop(self, slot: Slot) -> None:
        """Forget the content of a ready or adopted slot."""
        if slot.pins:
            raise SlotError(f"slot {slot.number}: drop while pinned {slot.pins} times")
        if slot.state is SlotState.ADOPTED:
            self._count_adopted(slot, -1)
        self._clear(slot, "drop")

    def adopt(self, slot: Slot) -> None:
        """Compute has, or makes, a copy of the content: nothing else may happen to the slot."""
        if slot.pins:
            raise SlotError(f"slot {slot.number}: adopt while pinned {slot.pins} times")
        self._move(slot, "adopt")
        self._count_adopted(slot, 1)

    def keep(self, slot: Slot) -> None:
        """Compute has no copy: the slot is ready as before."""
        self._move(slot, "keep")
        self._count_adopted(slot, -1)

    def retire(self, slot: Slot) -> None:
        """Take a free slot out of use: its memory goes back to the system."""
        self._move(slot, "retire")
        self._retired[slot.slot_class].append(slot.number)

    def restore(self, slot_class: int) -> Slot:
        """Put the slot of a class that was retired last back to use; there must be one."""
        slot = self.slots[self._retired[slot_class][-1]]
        self._move(slot, "restore")
        self._retired[slot_class].pop()
        self._free[slot_class].append(slot.number)
        return slot

    def pin(self, slot: Slot) -> None:
        """A step uses the slot."""
        slot.pins += 1
        self._n_pins += 1

    def unpin(self, slot: Slot) -> None:
        """A step is done with the slot."""
        if slot.pins < 1:
            raise SlotError(f"slot {slot.number}: release without a grant")
        slot.pins -= 1
        self._n_pins -= 1

    def unpin_all(self) -> None:
        """No step uses any slot."""
        if self._n_pins:
            for slot in self.slots:
                slot.pins = 0
            self._n_pins = 0

    def count(self, state: SlotState, slot_class: int | None = None) -> int:
        """Slots in a state, of one class or of all."""
        return sum(
            1
            for slot in self.slots
            if slot.state is state and slot_class in (None, slot.slot_class)
        )

    def resident(self) -> Iterator[tuple[Key, Slot]]:
        """Keys whose slab is ready, or with compute."""
        return ((key, slot) for key, slot in self._of_key.items() if slot.state in RESIDENT)

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        for slot in self.slots:
            assert slot.pins >= 0, slot
            has_key = slot.state not in (SlotState.FREE, SlotState.RETIRED)
            assert (slot.key is not None) == has_key, slot
            assert not slot.key or self._of_key.get(slot.key) is slot, slot
            assert has_key or slot.pins == 0, slot
        assert self._n_pins == sum(slot.pins for slot in self.slots)
        n_free = sum(len(free) for free in self._free)
        assert n_free == self.count(SlotState.FREE)
        assert sum(len(gone) for gone in self._retired) == self.count(SlotState.RETIRED)
        n_adopted = self.count(SlotState.ADOPTED)
        assert n_adopted == sum(self._n_adopted.values())
        assert sum(self._n_of_layer.values()) == len(self._of_key) - n_adopted
        assert len(self._of_key) == sum(1 for slot in self.slots if slot.key is not None)

    def _count_adopted(self, slot: Slot, change: int) -> None:
        assert slot.key is not None
        self._n_adopted[slot.slot_class] += change
        self._n_of_layer[slot.key[0]] -= change

    def _clear(self, slot: Slot, event: str) -> None:
        self._move(slot, event)
        self._detach(slot)
        self._free[slot.slot_class].append(slot.number)

    def _detach(self, slot: Slot) -> None:
        if slot.key is not None:
            del self._of_key[slot.key]
            self._n_of_layer[slot.key[0]] -= 1
            slot.key = None

    def _move(self, slot: Slot, event: str) -> None:
        new = _LEGAL.get((slot.state, event))
        if new is None:
            raise SlotError(f"slot {slot.number}: {event} while {slot.state.value}")
        if slot.state is SlotState.FREE:
            free = self._free[slot.slot_class]
            if free[-1] == slot.number:  # what `take_free` names: the usual case, O(1)
                free.pop()
            else:
                free.remove(slot.number)
        slot.state = new
