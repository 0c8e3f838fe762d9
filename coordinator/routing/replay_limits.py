"""What a trace allows: the most hits that any policy can have, and what the page cache would do.

All are functions of a trace and a size; neither knows slots, steps or messages.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from coordinator.core.policies import Key
from coordinator.routing.replay import Outcome
from shm.messages import Need


def belady(
    needs: Sequence[Need],
    class_of_layer: Mapping[int, int],
    slots_of_class: Sequence[int],
    slab_bytes: Mapping[int, int],
) -> Outcome:
    """The optimum of Belady: of each class the expert goes that is needed again last.

    More is allowed than to a policy: it knows what comes, and may evict what the layer at hand has
    just used.
    """
    outcome = Outcome()
    classes = [_Farthest(n_slots) for n_slots in slots_of_class]
    for need, next_uses in zip(needs, _next_uses(needs), strict=True):
        resident = classes[class_of_layer[need.layer]]
        keys = [(need.layer, use.expert) for use in need.experts]
        uses = list(zip(keys, next_uses, strict=True))
        hits = [(key, after) for key, after in uses if key in resident.next_use]
        misses = [(key, after) for key, after in uses if key not in resident.next_use]
        for key, after in hits + misses:
            resident.use(key, after)
        outcome.add(need, len(hits), slab_bytes[need.layer])
    return outcome


def page_cache(needs: Sequence[Need], slab_bytes: Mapping[int, int], n_bytes: int) -> Outcome:
    """A page cache of `n_bytes` that drops its least recently used pages: an expert's go together.

    The rule of a kernel differs (two lists); a policy of ours has to be no worse than this.
    """
    outcome = Outcome()
    cached: OrderedDict[Key, int] = OrderedDict()
    n_cached_bytes = 0
    for need in needs:
        n_hits = 0
        for use in need.experts:
            key = (need.layer, use.expert)
            if key in cached:
                cached.move_to_end(key)
                n_hits += 1
                continue
            cached[key] = slab_bytes[need.layer]
            n_cached_bytes += cached[key]
            while n_cached_bytes > n_bytes and len(cached) > 1:
                _, freed = cached.popitem(last=False)
                n_cached_bytes -= freed
        outcome.add(need, n_hits, slab_bytes[need.layer])
    return outcome


def preloaded(needs: Sequence[Need]) -> Outcome:
    """Where everything fits it is read before the first step: whatever is asked for is there."""
    outcome = Outcome()
    for need in needs:
        outcome.add(need, len(need.experts), 0)
    return outcome


class _Farthest:
    """Resident keys by their next use; a heap with stale entries finds the farthest."""

    def __init__(self, n_slots: int) -> None:
        self.next_use: dict[Key, int] = {}
        self._n_slots = n_slots
        self._heap: list[tuple[int, Key]] = []

    def use(self, key: Key, after: int) -> None:
        """The key is used now and again at `after`; one that is not resident pushes another out."""
        if key not in self.next_use and len(self.next_use) >= self._n_slots:
            self._evict()
        self.next_use[key] = after
        heapq.heappush(self._heap, (-after, key))

    def _evict(self) -> None:
        while True:
            negative, key = heapq.heappop(self._heap)
            if self.next_use.get(key) == -negative:
                del self.next_use[key]
                return


def _next_uses(needs: Sequence[Need]) -> list[list[int]]:
    """For every use of every need the index of the next need with the same key."""
    never = len(needs)
    upcoming: dict[Key, int] = {}
    found: list[list[int]] = [[] for _ in needs]
    for at in range(len(needs) - 1, -1, -1):
        keys = [(needs[at].layer, use.expert) for use in needs[at].experts]
        found[at] = [upcoming.get(key, never) for key in keys]
        upcoming.update(dict.fromkeys(keys, at))
    return found
