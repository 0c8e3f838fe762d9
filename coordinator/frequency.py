"""The policy that counts uses. It keeps the rules of `policies`.

Chosen by replay (the table in `tests/hit_rates.md` has the command): the best of all rules at every
size of the pool. What was tried beside it and did not win: a share of the pool for each layer, the
distance to the layer in the token cycle, count ÷ age, and two half-lives at once.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.policies import IsLocked, Key, PolicyGeometry

# A use counts half after so many tokens. 16 to 128 differ by less than one point of hit rate: the
# short ones follow a text that changes, the long ones gain where it does not.
HALF_LIFE_TOKENS = 32
# Counts of other texts weigh as much as so many tokens of this one. Up to 8 they do no harm, from
# 32 on they hold what this text does not use.
SEED_TOKENS = 4


@dataclass(slots=True)
class _Ranked:
    """Resident keys of a layer in a heap with stale entries: (score, clock of the use, key)."""

    heap: list[tuple[float, int, Key]] = field(default_factory=list)
    entry: dict[Key, tuple[float, int]] = field(default_factory=dict)


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
        self._ranked = {layer: _Ranked() for layer in geometry.class_of_layer}

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        weight = now / self._half_life_needs + math.log2(n_tokens) / 2
        self._score[key] = _log2_add(self._score.get(key, -math.inf), weight)
        ranked = self._ranked[key[0]]
        if key in ranked.entry:
            self._rank(ranked, key, now)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._rank(self._ranked[key[0]], key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._ranked[key[0]].entry.pop(key, None)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        best: tuple[float, int, Key] | None = None
        for other in among:
            first = _first(self._ranked[other], is_locked)
            if first is not None and (best is None or first < best):
                best = first
        return best[2] if best is not None else None

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


def _first(ranked: _Ranked, is_locked: IsLocked) -> tuple[float, int, Key] | None:
    """The lowest entry of a layer that is not locked; it stays in the heap."""
    locked: list[tuple[float, int, Key]] = []
    found = None
    while ranked.heap and found is None:
        score, at, key = lowest = ranked.heap[0]
        if ranked.entry.get(key) != (score, at):
            heapq.heappop(ranked.heap)  # stale: used or forgotten since
        elif is_locked(key):
            locked.append(heapq.heappop(ranked.heap))
        else:
            found = lowest
    for entry in locked:
        heapq.heappush(ranked.heap, entry)
    return found


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
