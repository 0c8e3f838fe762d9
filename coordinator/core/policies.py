"""Which resident expert has to go when a slot is needed: the rule of all policies, and those that
go by recency. `frequency` has those that count, `hot_set` those that never let go of some.

A policy sees keys `(layer, expert)`, the slot class of each layer, and a clock that counts `Need`s.
It knows nothing of slots, bytes or disks. Each keeps the resident keys of a class in order, and
those of a layer, from which alone a prompt may take; the victim is the first that is not locked.
Locked keys (in use, or on their way from the disk) are few and recent, so the walk past them is
short: every call is O(1) or O(log n).

Rules that a change must keep: no randomness, no wall clock (a replay of a trace must decide the
same), and a victim is always resident, of a layer that was offered, and not locked.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)
IsLocked = Callable[[Key], bool]

SLRU_PROTECTED_SHARE = 0.7  # of 0.5 to 0.9 the best in replay over all sizes (tests/hit_rates.md)


@dataclass(frozen=True, slots=True)
class PolicyGeometry:
    """What a policy may know of the pool: class of each layer, and slots of each class."""

    class_of_layer: Mapping[int, int]
    slots_of_class: tuple[int, ...]  # when the run begins; `resize` tells of changes

    def layers_of_classes(self) -> list[tuple[int, ...]]:
        """The layers that share each class."""
        return [
            tuple(layer for layer, own in self.class_of_layer.items() if own == slot_class)
            for slot_class in range(len(self.slots_of_class))
        ]


class Policy(Protocol):
    """What the slot table asks of a policy."""

    @property
    def hot(self) -> frozenset[Key]:
        """Never evicted while another key can go; empty for most policies."""

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """The expert is used by so many tokens of a step, resident or not."""

    def admit(self, key: Key, now: int) -> None:
        """The expert becomes resident."""

    def forget(self, key: Key) -> None:
        """The expert is not resident any more."""

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """Whom to evict so that an expert of `layer` can come in.

        Only the layers `among` give one up, all of its class; None when all of theirs are locked.
        """

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """Classes have so many slots from now on, more or fewer than before."""


class Recency:
    """Keys in the order of their last use, of each class and of each layer."""

    def __init__(self, geometry: PolicyGeometry) -> None:
        self._class_of_layer = geometry.class_of_layer
        self._n_layers = [len(layers) for layers in geometry.layers_of_classes()]
        self._of_class: list[OrderedDict[Key, None]] = [OrderedDict() for _ in self._n_layers]
        self._of_layer: dict[int, OrderedDict[Key, None]] = {
            layer: OrderedDict() for layer in geometry.class_of_layer
        }

    def __contains__(self, key: Key) -> bool:
        return key in self._of_layer[key[0]]

    def n_of_layer(self, layer: int) -> int:
        """Keys of a layer."""
        return len(self._of_layer[layer])

    def put(self, key: Key) -> None:
        """The key, new or known, is the latest."""
        for order in self._orders(key[0]):
            order[key] = None
            order.move_to_end(key)

    def drop(self, key: Key) -> None:
        """The key goes, if it is there."""
        for order in self._orders(key[0]):
            order.pop(key, None)

    def oldest(self, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """The key that was used longest ago in some layers of a class, locked ones aside."""
        if not among:
            return None
        of_class, order = self._orders(among[0])
        if len(among) > 1:
            order = of_class
        is_whole = len(among) in (1, self._n_layers[self._class_of_layer[among[0]]])
        for key in order:
            if not is_locked(key) and (is_whole or key[0] in among):
                return key
        return None

    def _orders(self, layer: int) -> tuple[OrderedDict[Key, None], OrderedDict[Key, None]]:
        return self._of_class[self._class_of_layer[layer]], self._of_layer[layer]


class Lru:
    """Least recently used over all layers of a class."""

    def __init__(self, geometry: PolicyGeometry) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._order = Recency(geometry)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        if key in self._order:
            self._order.put(key)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._order.put(key)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._order.drop(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        return self._order.oldest(among, is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. Order does not depend on size."""


class LayerLru:
    """Least recently used within the layer, once the layer holds its equal share of the class.

    A layer below its share takes from the layer that is furthest above its own. This avoids the
    token-cycle cliff of `Lru`: a pool smaller than one token's experts still hits.
    """

    def __init__(self, geometry: PolicyGeometry) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self._n_layers = [len(layers) for layers in geometry.layers_of_classes()]
        self._order = Recency(geometry)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        if key in self._order:
            self._order.put(key)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._order.put(key)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._order.drop(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        slot_class = self._geometry.class_of_layer[layer]
        fullest_first = sorted(among, key=lambda other: (-self._order.n_of_layer(other), other))
        share = self._slots_of_class[slot_class] / self._n_layers[slot_class]
        if self._order.n_of_layer(layer) >= share:
            fullest_first.sort(key=lambda other: other != layer)  # its own first, if offered
        for other in fullest_first:
            key = self._order.oldest((other,), is_locked)
            if key is not None:
                return key
        return None

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        self._slots_of_class = slots_of_class


class Slru:
    """Segmented LRU: a key enters on probation; a second use protects it.

    The protected segment holds at most `SLRU_PROTECTED_SHARE` of a class; its least recently used
    key falls back to probation. Victims come from probation first.
    """

    def __init__(self, geometry: PolicyGeometry) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self._probation = Recency(geometry)
        self._protected = Recency(geometry)
        self._layers = geometry.layers_of_classes()
        self._n_protected = [0] * len(self._layers)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        if key in self._protected:
            self._protected.put(key)
        elif key in self._probation:
            self._probation.drop(key)
            self._protected.put(key)
            self._fall_back(self._geometry.class_of_layer[key[0]])

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._probation.put(key)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        if key in self._protected:
            self._n_protected[self._geometry.class_of_layer[key[0]]] -= 1
            self._protected.drop(key)
        self._probation.drop(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        chosen = self._probation.oldest(among, is_locked)
        return chosen or self._protected.oldest(among, is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. What is protected falls back with the next use."""
        self._slots_of_class = slots_of_class

    def _fall_back(self, slot_class: int) -> None:
        """One more key of the class is protected: make room for it."""
        self._n_protected[slot_class] += 1
        limit = max(1.0, SLRU_PROTECTED_SHARE * self._slots_of_class[slot_class])
        while self._n_protected[slot_class] > limit:
            oldest = self._protected.oldest(self._layers[slot_class], lambda key: False)
            assert oldest is not None
            self._protected.drop(oldest)
            self._probation.put(oldest)
            self._n_protected[slot_class] -= 1
