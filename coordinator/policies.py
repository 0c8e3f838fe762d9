"""Which resident expert has to go when a slot is needed: the eviction policies.

A policy sees keys `(layer, expert)`, the slot class of each, and a clock that counts `Need`s. It
knows nothing of slots, bytes or disks. Per class it orders the resident keys; `victim` names the
first in that order that is not locked. Locked keys (in use, or on their way from the disk) are few
and recent, so the walk past them is short: every call is O(1) or O(log n).

Rules that a change must keep: no randomness, no wall clock (a replay of a trace must decide the
same), and a victim is always resident, of the asked class, and not locked.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)
IsLocked = Callable[[Key], bool]

LFU_HALF_LIFE_NEEDS_PER_LAYER = 128  # a use counts half after so many tokens
SLRU_PROTECTED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class PolicyGeometry:
    """What a policy may know of the pool: class of each layer, and slots of each class."""

    class_of_layer: Mapping[int, int]
    slots_of_class: tuple[int, ...]  # when the run begins; `resize` tells of changes

    def layers_of_class(self, slot_class: int) -> int:
        """Number of layers that share the class."""
        return sum(1 for found in self.class_of_layer.values() if found == slot_class)


class Policy(Protocol):
    """What the slot table asks of a policy."""

    hot: frozenset[Key]  # never evicted while another key can go; empty for most policies

    def touch(self, key: Key, now: int) -> None:
        """The expert is used by a step, resident or not."""

    def admit(self, key: Key, now: int) -> None:
        """The expert becomes resident."""

    def forget(self, key: Key) -> None:
        """The expert is not resident any more."""

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """Whom to evict so that `key` can come in; None when all of its class are locked."""

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """Classes have so many slots from now on, more or fewer than before."""


class Lru:
    """Least recently used over all layers of a class."""

    def __init__(self, geometry: PolicyGeometry) -> None:
        self._geometry = geometry
        self.hot: frozenset[Key] = frozenset()
        self._order: list[OrderedDict[Key, None]] = [OrderedDict() for _ in geometry.slots_of_class]

    def _of(self, key: Key) -> OrderedDict[Key, None]:
        return self._order[self._geometry.class_of_layer[key[0]]]

    def touch(self, key: Key, now: int) -> None:
        """See `Policy`."""
        order = self._of(key)
        if key in order:
            order.move_to_end(key)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._of(key)[key] = None

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._of(key).pop(key, None)

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        return _first_free(self._of(key), is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. Order does not depend on size."""


class LayerLru:
    """Least recently used within the layer, once the layer holds its equal share of the class.

    A layer below its share takes from the layer that is furthest above its own. This avoids the
    token-cycle cliff of `Lru`: a pool smaller than one token's experts still hits.
    """

    def __init__(self, geometry: PolicyGeometry) -> None:
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self.hot: frozenset[Key] = frozenset()
        self._order: dict[int, OrderedDict[Key, None]] = {
            layer: OrderedDict() for layer in geometry.class_of_layer
        }

    def touch(self, key: Key, now: int) -> None:
        """See `Policy`."""
        order = self._order[key[0]]
        if key in order:
            order.move_to_end(key)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._order[key[0]][key] = None

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._order[key[0]].pop(key, None)

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        slot_class = self._geometry.class_of_layer[key[0]]
        share = self._slots_of_class[slot_class] / self._geometry.layers_of_class(slot_class)
        if len(self._order[key[0]]) >= share:
            own = _first_free(self._order[key[0]], is_locked)
            if own is not None:
                return own
        layers = [
            layer for layer, found in self._geometry.class_of_layer.items() if found == slot_class
        ]
        for layer in sorted(layers, key=lambda layer: (-len(self._order[layer]), layer)):
            other = _first_free(self._order[layer], is_locked)
            if other is not None:
                return other
        return None

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        self._slots_of_class = slots_of_class


@dataclass(slots=True)
class _Ranked:
    """Resident keys of a class in a heap with stale entries: (score, tie, key)."""

    heap: list[tuple[float, int, Key]] = field(default_factory=list)
    entry: dict[Key, tuple[float, int]] = field(default_factory=dict)


class Lfu:
    """Least frequently used, with decay: a use of `half_life` needs ago counts half.

    With u = now / half_life, a use at time u weighs 2**u; all scores grow by the same factor as
    time passes, so their order changes only when a key is used. Kept as log2 so that it never
    overflows: score = log2(2**score + 2**u). Counts outlive residency: an expert that comes back
    is not a newcomer.
    """

    def __init__(self, geometry: PolicyGeometry, usage: Mapping[Key, float] | None = None) -> None:
        self._geometry = geometry
        self.hot: frozenset[Key] = frozenset()
        self._half_life = LFU_HALF_LIFE_NEEDS_PER_LAYER * max(1, len(geometry.class_of_layer))
        self._score: dict[Key, float] = {
            key: math.log2(count) for key, count in (usage or {}).items() if count > 0
        }
        self._ranked = [_Ranked() for _ in geometry.slots_of_class]

    def touch(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._score[key] = _log2_add(self._score.get(key, -math.inf), now / self._half_life)
        ranked = self._ranked[self._geometry.class_of_layer[key[0]]]
        if key in ranked.entry:
            self._rank(ranked, key, now)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._rank(self._ranked[self._geometry.class_of_layer[key[0]]], key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._ranked[self._geometry.class_of_layer[key[0]]].entry.pop(key, None)

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        ranked = self._ranked[self._geometry.class_of_layer[key[0]]]
        locked: list[tuple[float, int, Key]] = []
        chosen = None
        while ranked.heap and chosen is None:
            score, tie, candidate = ranked.heap[0]
            if ranked.entry.get(candidate) != (score, tie):
                heapq.heappop(ranked.heap)  # stale: used or forgotten since
            elif is_locked(candidate):
                locked.append(heapq.heappop(ranked.heap))
            else:
                chosen = candidate
        for item in locked:
            heapq.heappush(ranked.heap, item)
        return chosen

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. Order does not depend on size."""

    def _rank(self, ranked: _Ranked, key: Key, now: int) -> None:
        # ties go to the older use, then to the smaller key, so that the order is total
        entry = (self._score.get(key, -math.inf), now)
        ranked.entry[key] = entry
        heapq.heappush(ranked.heap, (*entry, key))
        if len(ranked.heap) > 8 * len(ranked.entry) + 64:
            ranked.heap = [(*found, resident) for resident, found in ranked.entry.items()]
            heapq.heapify(ranked.heap)


class Slru:
    """Segmented LRU: a key enters on probation; a second use protects it.

    The protected segment holds at most `SLRU_PROTECTED_SHARE` of a class; its least recently used
    key falls back to probation. Victims come from probation first.
    """

    def __init__(self, geometry: PolicyGeometry) -> None:
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self.hot: frozenset[Key] = frozenset()
        self._probation: list[OrderedDict[Key, None]] = [
            OrderedDict() for _ in geometry.slots_of_class
        ]
        self._protected: list[OrderedDict[Key, None]] = [
            OrderedDict() for _ in geometry.slots_of_class
        ]

    def touch(self, key: Key, now: int) -> None:
        """See `Policy`."""
        slot_class = self._geometry.class_of_layer[key[0]]
        probation, protected = self._probation[slot_class], self._protected[slot_class]
        if key in protected:
            protected.move_to_end(key)
        elif key in probation:
            del probation[key]
            protected[key] = None
            limit = SLRU_PROTECTED_SHARE * self._slots_of_class[slot_class]
            while len(protected) > max(1, limit):
                oldest, _ = protected.popitem(last=False)
                probation[oldest] = None

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._probation[self._geometry.class_of_layer[key[0]]][key] = None

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        slot_class = self._geometry.class_of_layer[key[0]]
        self._probation[slot_class].pop(key, None)
        self._protected[slot_class].pop(key, None)

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        slot_class = self._geometry.class_of_layer[key[0]]
        chosen = _first_free(self._probation[slot_class], is_locked)
        return chosen or _first_free(self._protected[slot_class], is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. What is protected falls back with the next use."""
        self._slots_of_class = slots_of_class


def _first_free(order: Iterable[Key], is_locked: IsLocked) -> Key | None:
    return next((key for key in order if not is_locked(key)), None)


def _log2_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** (low - high))
