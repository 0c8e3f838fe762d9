"""The policy that counts uses. It keeps the rules of `policies`.

Chosen by replay (`tests/policy_evidence.md`): the best or next to the best of all rules at every
size of the pool, on recorded routing and on made-up routing with more memory of the last token.
What was tried beside it and did not win: a share of the pool for each layer, the distance to the
layer in the token cycle, count ÷ age, and two half-lives at once.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from coordinator.core.policies import IsLocked, Key, PolicyGeometry

# A use counts half after so many tokens. 16 to 128 differ by less than one point of hit rate: the
# short ones follow a text that changes, the long ones gain where it does not.
HALF_LIFE_TOKENS = 32
# Counts of other texts weigh as much as so many tokens of this one. Up to 8 they do no harm, from
# 32 on they hold what this text does not use.
SEED_TOKENS = 4
# A score of 1 now makes a use by the next token so likely, if nothing changes.
SHARE_OF_ONE_TOKEN = 1 - 2 ** (-1 / HALF_LIFE_TOKENS)
MAX_LAST_PER_ACTIVE = 4  # a layer that used more experts than so many tokens had a prompt


# Of what was measured, see `Repeats`: the whole of it cost a point where tokens have no memory.
BOOST_SHARE = 0.5

Entry = tuple[float, int]  # score, clock of the last use: ties go to the older use


class Repeats:
    """How much more often than their counts say experts of the last token are used again.

    In some models a token uses many experts of the one before, in others hardly more than chance
    would have it, so it is measured: repeats seen less those that counts foretold, per use.
    """

    def __init__(self, n_uses: int) -> None:
        self._n_uses = n_uses  # after twice as many, the past counts half
        self._seen = 0.0
        self._foretold = 0.0
        self._uses = 0.0

    @property
    def surplus(self) -> float:
        """A probability: of a repeat, beyond what the count says."""
        return max(0.0, self._seen - self._foretold) / max(1.0, self._uses)

    def add(self, *, is_repeat: bool, foretold: float) -> None:
        """An expert is used; `foretold` is how likely its count makes it for the next token."""
        self._seen += is_repeat
        self._foretold += min(1.0, foretold)
        self._uses += 1.0
        if self._uses > 2 * self._n_uses:
            self._seen, self._foretold, self._uses = (
                self._seen / 2, self._foretold / 2, self._uses / 2,
            )  # fmt: skip


class Lfu:
    """Least frequently used, with decay: a use `HALF_LIFE_TOKENS` ago counts half.

    A use by n tokens of a prompt counts √n: more than one, since it tells what the answer will use,
    and far less than n, since it is one text's beginning. An expert of the last token counts more
    until its layer's next token, by what `Repeats` measured. `seed`: counts to start from, of any
    scale. Counts outlive residency: an expert that comes back is not a newcomer.

    With u = now ÷ half-life a use at time u weighs 2**u; all scores grow by the same factor as time
    passes, so that their order changes only when a key is used. Kept as log2: nothing overflows.
    """

    def __init__(
        self, geometry: PolicyGeometry, seed: Mapping[Key, float] | None = None, n_active: int = 1
    ) -> None:
        self.hot: frozenset[Key] = frozenset()
        n_layers = max(1, len(geometry.class_of_layer))
        self._half_life_needs = HALF_LIFE_TOKENS * n_layers
        self._max_last = MAX_LAST_PER_ACTIVE * n_active
        self._repeats = Repeats(HALF_LIFE_TOKENS * n_layers * n_active)
        self._score = dict(_seed_scores(seed or {}, n_active))
        self._class_of_layer = geometry.class_of_layer
        self._layers = geometry.layers_of_classes()
        self._last: dict[int, set[Key]] = {layer: set() for layer in geometry.class_of_layer}
        self._before: set[Key] = set()  # `_last` of the layer at hand, one token earlier
        self._boosted: dict[int, list[Key]] = {layer: [] for layer in geometry.class_of_layer}
        self._now = -1
        self._resident: dict[int, dict[Key, Entry]] = {x: {} for x in geometry.class_of_layer}
        # of each class, lowest first; with stale entries, which `_resident` tells from good ones
        self._heaps: list[list[tuple[float, int, Key]]] = [[] for _ in self._layers]
        self._n_resident = [0] * len(self._layers)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        if now != self._now:
            self._begin(key[0], now)
        u = now / self._half_life_needs
        weight = u if n_tokens == 1 else u + math.log2(n_tokens) / 2
        self._score[key] = score = _log2_add(self._score.get(key, -math.inf), weight)
        if self._before:
            foretold = 2.0 ** (score - u) * SHARE_OF_ONE_TOKEN
            self._repeats.add(is_repeat=key in self._before, foretold=foretold)
        self._last[key[0]].add(key)
        if key in self._resident[key[0]]:
            self.admit(key, now)

    def _begin(self, layer: int, now: int) -> None:
        """A layer's next token: what its last one used counts as before."""
        self._now = now
        self._before, self._last[layer] = self._last[layer], set()
        boosted, self._boosted[layer] = self._boosted[layer], []
        for key in boosted:
            if key in self._resident[layer]:
                self._rank(key, self._score[key], self._resident[layer][key][1])
        if len(self._before) > self._max_last:
            self._before = set()  # a prompt uses nearly all: that says nothing of repeats

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        score = self._score.get(key, -math.inf)
        last = self._last[key[0]]
        surplus = BOOST_SHARE * self._repeats.surplus if key in last else 0.0
        if surplus and len(last) <= self._max_last:
            boost = math.log2(surplus / SHARE_OF_ONE_TOKEN)
            score = _log2_add(score, now / self._half_life_needs + boost)
            self._boosted[key[0]].append(key)
        self._rank(key, score, now)

    def _rank(self, key: Key, score: float, at: int) -> None:
        """The place of a resident key in its class."""
        slot_class, own = self._class_of_layer[key[0]], self._resident[key[0]]
        heap = self._heaps[slot_class]
        self._n_resident[slot_class] += key not in own
        own[key] = (score, at)
        heapq.heappush(heap, (score, at, key))
        if len(heap) > 8 * self._n_resident[slot_class] + 64:
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
        """Throw stale entries away: they outnumber the others by far."""
        heap = self._heaps[slot_class]
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
    if a < b:
        a, b = b, a
    return a + math.log2(1.0 + 2.0 ** (b - a))
