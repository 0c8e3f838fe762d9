"""What was used, layer by layer: the clock, the counts and the guesses that decisions go by.

Part of the decision core. A layer counts the same whether compute asked for its experts or had a
lasting grant of them all, and layers count in the order in which they were computed: so hits and
victims depend on what was used alone.
"""

from collections import Counter

from coordinator.core.geometry import ExpertCounters, PoolGeometry
from coordinator.core.placement import Placement
from coordinator.core.policies import Key
from coordinator.core.prefetch import Prefetch
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import SlotState
from shm.messages import KnownLayer, Need


class NotedUses:
    """Uses by expert, and `n_needs`, which counts layers."""

    def __init__(
        self,
        geometry: PoolGeometry,
        placement: Placement,
        prefetch: Prefetch,
        counters: ExpertCounters,
    ) -> None:
        self.n_needs = 0
        self.of_key: Counter[Key] = Counter()
        self._geometry = geometry
        self._placement = placement
        self._prefetch = prefetch
        self._counters = counters

    def add(self, layer: ServedLayer, n_hits: int) -> None:
        """A layer uses its experts, of which so many were there."""
        need, uses = layer.need, layer.uses_in_order()
        self.n_needs += 1
        self._counters.add_need(n_hits, len(uses) - n_hits)
        for use in uses:
            key = (need.layer, use.expert)
            self.of_key[key] += use.n_tokens
            self._placement.touch(key, self.n_needs, use.n_tokens)
        self._prefetch.handle_need(need, self._geometry.next_layer(need.layer))

    def add_known(self, known: KnownLayer) -> None:
        """Compute was done with a layer without asking."""
        slots = [self._placement.slots.find((known.layer, use.expert)) for use in known.experts]
        n_hits = sum(1 for slot in slots if slot and slot.state is SlotState.READY)
        self.add(ServedLayer(Need(0, known.layer, known.experts, (), ())), n_hits)
