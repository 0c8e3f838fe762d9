"""The policy that counts uses. It keeps the rules of `policies`.

Chosen by replay (the table in `tests/hit_rates.md` has the command): the best of all rules at every
size of the pool. What was tried beside it and did not win: a share of the pool for each layer, the
distance to the layer in the token cycle, count ÷ age, and two half-lives at once.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from coordinator.policies import IsLocked, Key, PolicyGeometry

# A use counts half after so many tokens. 16 to 128 differ by less than one point of hit rate: the
# short ones follow a text that changes, the long ones gain where it does not.
HALF_LIFE_TOKENS = 32
# Counts of other texts weigh as much as so many tokens of this one. Up to 8 they do no harm, from
# 32 on they hold what this text does not use.
SEED_TOKENS = 4


Entry = tuple[float, int]  # score, clock of the last use: ties go to the older use


class Lfu:
    """Least frequently used, with decay: a use `HALF_LIFE_TOKENS` ago counts half.

    A use by n tokens of a prompt counts √n: more than one, since it tells what the answer will use,
    and far less than n, since it is one text's beginning. With u = now ÷ half-life a use at time u
    weighs 2**u; all scores grow by the same factor as time passes, so that their order changes only
    when a key is used. Kept as log2, so that nothing overflows. Counts outlive residency: an expert
    that comes back is not a newcomer. `seed`: counts to start from, of any scale.
    """

    def __init__(
        self, geometry: PolicyGeometry, seed: Mapping[Key, float] | None = None, n_active: int = 1
    ) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._half_life_needs = HALF_LIFE_TOKENS * max(1, len(geometry.class_of_layer))
        self._score = dict(_seed_scores(seed or {}, n_active))
        self._class_of_layer = geometry.class_of_layer
        self._layers = geometry.layers_of_classes()
        self._resident: dict[int, dict[Key, Entry]] = {x: {} for x in geometry.class_of_layer}
        # of each class, lowest first; with stale entries, which `_resident` tells from good ones
        self._heaps: list[list[tuple[float, int, Key]]] = [[] for _ in self._layers]
        self._n_resident = [0] * len(self._layers)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        weight = now / self._half_life_needs + math.log2(n_tokens) / 2
        self._score[key] = _log2_add(self._score.get(key, -math.inf), weight)
        if key in self._resident[key[0]]:
            self.admit(key, now)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        slot_class = self._class_of_layer[key[0]]
        entry = (self._score.get(key, -math.inf), now)
        self._n_resident[slot_class] += key not in self._resident[key[0]]
        self._resident[key[0]][key] = entry
        heapq.heappush(self._heaps[slot_class], (*entry, key))
        self._sweep(slot_class)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        if self._resident[key[0]].pop(key, None) is not None:
            self._n_resident[self._class_of_layer[key[0]]] -= 1

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        slot_class = self._class_of_layer[layer]
        if len(among) == len(self._layers[slot_class]):
            return self._first(self._heaps[slot_class], is_locked)
        # a prompt at its layer's share, or a pool that shrinks: seldom, and few to look at
        free = (
            (*entry, key)
            for other in among
            for key, entry in self._resident[other].items()
            if not is_locked(key)
        )
        return min(free, default=(0.0, 0, None))[2]

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`. Order does not depend on size."""

    def _first(self, heap: list[tuple[float, int, Key]], is_locked: IsLocked) -> Key | None:
        """The lowest that is not locked; it stays in the heap."""
        locked: list[tuple[float, int, Key]] = []
        found = None
        while heap and found is None:
            score, at, key = heap[0]
            if self._resident[key[0]].get(key) != (score, at):
                heapq.heappop(heap)  # stale: used or forgotten since
            elif is_locked(key):
                locked.append(heapq.heappop(heap))
            else:
                found = key
        for entry in locked:
            heapq.heappush(heap, entry)
        return found

    def _sweep(self, slot_class: int) -> None:
        """Throw stale entries away before they outnumber the others by far."""
        heap = self._heaps[slot_class]
        if len(heap) > 8 * self._n_resident[slot_class] + 64:
            heap[:] = [
                (*entry, key)
                for layer in self._layers[slot_class]
                for key, entry in self._resident[layer].items()
            ]
            heapq.heapify(heap)


def _seed_scores(seed: Mapping[Key, float], n_active: int) -> Iterable[tuple[Key, float]]:
    """Scores in which the counts of a layer make up `SEED_TOKENS` tokens at time 0."""
    totals: dict[int, float] = {}
    for (layer, _), count in seed.items():
        totals[layer] = totals.get(layer, 0.0) + count
    for key, count in seed.items():
        if count > 0:
            yield key, math.log2(count / totals[key[0]] * n_active * SEED_TOKENS)


def _log2_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** (low - high))
