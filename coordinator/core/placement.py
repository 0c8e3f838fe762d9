"""Which slot an expert gets: slot table and policy behind one door, always in step.

Part of the decision core: no I/O, no clock. The policy may run ahead of the table by one layer:
an expert that will follow another into its slot counts as resident from the moment that is decided
(see `follow`), so that later decisions do not depend on when slots come free.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Set

from coordinator.core.geometry import PoolGeometry
from coordinator.core.policies import Key, Policy
from coordinator.core.slots import Slot, SlotState, SlotTable
from shm.messages import SlotLease

Queues = dict[int, deque[int]]  # slot -> experts of the layer that will follow into it, in order


class Placement:
    """Slots by key, and the policy that chooses victims."""

    def __init__(self, geometry: PoolGeometry, policy: Policy) -> None:
        self.slots = SlotTable(geometry.class_of_slots)
        self._evicted: list[Key] = []
        self._followers: set[Key] = set()  # have no slot yet, and will have one
        self._expected: frozenset[Key] = frozenset()  # stay where somebody else can go
        self._policy = policy
        self._geometry = geometry
        self._class_of_layer = geometry.class_of_layer
        self._layers_of_class = _layers_of_class(geometry.class_of_layer)
        self._share_of_layer = geometry.share_of_layers(geometry.slots_of_class)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """So many tokens of a step use the expert; `now` counts `Need`s."""
        self._policy.touch(key, now, n_tokens)

    def room_for(self, key: Key, *, is_prompt: bool) -> Slot | None:
        """A free slot or a victim's; None when all of the class are in use.

        A prompt may not push the experts of other layers out beyond its layer's equal share: it
        uses nearly all experts once, and would leave nothing that the answer needs. Free slots are
        nobody's. Where all that its layer has is hot it may: the hot set stays, and the layer needs
        slots to move in.
        """
        layer, slot_class = key[0], self._class_of_layer[key[0]]
        slot = self.slots.take_free(slot_class)
        if slot is not None:
            return slot
        victim = None
        if is_prompt and self.slots.n_of_layer(layer) >= self._share_of_layer[layer]:
            victim = self._policy.victim(layer, (layer,), self._is_locked)
            if victim is None and not self._policy.hot:
                return None
        if victim is None:
            among = self._layers_of_class[slot_class]
            victim = self._policy.victim(layer, among, self._is_locked)
            if victim is None and self._expected:
                victim = self._policy.victim(layer, among, self._is_in_use)
        return self.slots.find(victim) if victim is not None else None

    def expect(self, keys: Iterable[Key]) -> None:
        """These and no others will probably be used next."""
        self._expected = frozenset(keys)

    def clear(self, slot_class: int) -> bool:
        """Free one more slot of a class; False where nobody can go, or only who is hot."""
        layers = self._layers_of_class[slot_class]
        return self._evict(self._policy.victim(layers[0], layers, self._is_kept)) is not None

    def clear_for(self, layer: int) -> bool:
        """The same for an expert that a prompt will need in this layer, whose own experts wait for
        that as well: another layer's slot, as long as this one has less than its equal share."""
        slot_class = self._class_of_layer[layer]
        n_own = self.slots.n_of_layer(layer) + self.slots.n_free(slot_class)
        if n_own >= self._share_of_layer[layer]:
            return False
        among = [each for each in self._layers_of_class[slot_class] if each != layer]
        return self._evict(self._policy.victim(layer, among, self._is_kept)) is not None

    def lease(self, slot: Slot, key: Key, now: int) -> Slot:
        """Begin to fill a slot with the key."""
        self._replace(self.slots.lease(slot, key), key, now)
        return slot

    def lease_again(self, lease: SlotLease) -> Slot:
        """Who filled this slot is dead: it is filled with the same key anew."""
        slot = self.slots.slots[lease.slot]
        if slot.state is SlotState.LOADING:
            self.slots.condemn(slot)
        self.slots.lease_again(slot)
        return slot

    def fill_free(self, keys: Iterable[Key], now: int) -> list[Slot]:
        """Lease a free slot for each of these that is nowhere, as far as free slots go."""
        leased = []
        for key in keys:
            slot = self.slots.take_free(self._class_of_layer[key[0]])
            is_placed = self.slots.find(key) is not None or key in self._followers
            if slot is not None and not is_placed:
                leased.append(self.lease(slot, key, now))
        return leased

    def follow(self, layer: int, waiting: list[int], holders: list[Slot], now: int) -> Queues:
        """Decide which expert of the layer each one without a slot will follow into its slot."""
        queues: Queues = {}
        order = [slot for slot in holders if slot.key not in self._policy.hot] or holders
        for position, expert in enumerate(waiting):
            slot = order[position % len(order)]
            queue = queues.setdefault(slot.number, deque())
            before = (layer, queue[-1]) if queue else slot.key
            queue.append(expert)
            self._followers.add((layer, expert))
            self._replace(before, (layer, expert), now)
        return queues

    def take_over(self, slot: Slot, key: Key) -> Slot:
        """What `follow` decided happens: the policy knows already."""
        self._followers.discard(key)
        self.slots.lease(slot, key)
        return slot

    def forget_followers(self, layer: int, queues: Queues, now: int) -> None:
        """What `follow` decided will not happen: set the policy right."""
        for number, queue in queues.items():
            for expert in queue:
                self._followers.discard((layer, expert))
                self._policy.forget((layer, expert))
            key = self.slots.slots[number].key
            if queue and key is not None:
                self._policy.admit(key, now)

    def take_evicted(self) -> list[Key]:
        """Who had to go since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def fail(self, slot: Slot) -> None:
        """The slot's read failed: it is free, its key is nowhere."""
        if slot.key is not None:
            self._policy.forget(slot.key)
        self.slots.fail(slot)

    def drop(self, slot: Slot) -> None:
        """Give up what a ready or adopted slot holds."""
        if slot.key is not None:
            self._policy.forget(slot.key)
        self.slots.drop(slot)

    def adopt(self, slot: Slot) -> None:
        """Compute takes over what a ready slot holds: it is nobody's victim."""
        assert slot.key is not None
        self._policy.forget(slot.key)
        self.slots.adopt(slot)

    def keep(self, slot: Slot, now: int) -> None:
        """It did not."""
        assert slot.key is not None
        self.slots.keep(slot)
        self._policy.admit(slot.key, now)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """Classes have so many slots from now on."""
        self._share_of_layer = self._geometry.share_of_layers(slots_of_class)
        self._policy.resize(slots_of_class, now)

    def give_up(self, slot_class: int, layers_in_use: Set[int]) -> Slot | None:
        """Free a slot of a class, if none is free that of a victim; None when all are in use.

        Nothing of `layers_in_use` goes: compute uses them without telling.
        """
        slot = self.slots.take_free(slot_class)
        if slot is not None:
            return slot
        layers = self._layers_of_class[slot_class]
        fullest = max(layers, key=lambda layer: (self.slots.n_of_layer(layer), layer))
        among = [layer for layer in layers if layer not in layers_in_use]
        return self._evict(self._policy.victim(fullest, among, self._is_in_use))

    def _evict(self, victim: Key | None) -> Slot | None:
        """Free a victim's slot; returns it."""
        slot = self.slots.find(victim) if victim is not None else None
        if victim is not None and slot is not None:
            self._evicted.append(victim)
            self.drop(slot)
        return slot

    def _replace(self, evicted: Key | None, key: Key, now: int) -> None:
        if evicted is not None:
            self._policy.forget(evicted)
            self._evicted.append(evicted)
        self._policy.admit(key, now)

    def _is_kept(self, key: Key) -> bool:
        return key in self._policy.hot or self._is_locked(key)

    def _is_locked(self, key: Key) -> bool:
        return key in self._expected or self._is_in_use(key)

    def _is_in_use(self, key: Key) -> bool:
        slot = self.slots.find(key)
        return slot is None or slot.pins > 0 or slot.state is not SlotState.READY


def _layers_of_class(class_of_layer: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    layers: dict[int, tuple[int, ...]] = {}
    for layer, slot_class in class_of_layer.items():
        layers[slot_class] = (*layers.get(slot_class, ()), layer)
    return layers
