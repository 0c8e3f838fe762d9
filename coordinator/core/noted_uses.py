"""What was used, layer by layer: the clock, the counts and the guesses that decisions go by.

Part of the decision core. A layer counts the same whether compute asked for its experts or had a
lasting grant of them all, and layers count in the order in which they were computed: so hits and
victims depend on what was used alone.

Rule to keep: `touch` before victims are chosen, `count` before they are counted or a guess is read.
In between reads are handed out: they do not depend on the counting, and need not wait for it.
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
        self._uncounted: list[tuple[Need, int]] = []  # touched only, with how many hits

    def touch(self, layer: ServedLayer, n_hits: int) -> None:
        """A layer uses its experts, of which so many were there: what victims depend on."""
        number = layer.need.layer
        self.n_needs += 1
        for use in layer.uses_in_order():
            self._placement.touch((number, use.expert), self.n_needs, use.n_tokens)
        self._uncounted.append((layer.need, n_hits))

    def touch_known(self, known: KnownLayer) -> None:
        """Compute was done with a layer without asking."""
        slots = [self._placement.slots.find((known.layer, use.expert)) for use in known.experts]
        n_hits = sum(1 for slot in slots if slot and slot.state is SlotState.READY)
        need = Need(0, known.layer, known.experts, known.predicted, ())
        self.touch(ServedLayer(need), n_hits)

    def count(self) -> None:
        """All else that uses are noted for, of the layers since the last call."""
        for need, n_hits in self._uncounted:
            self._counters.add_need(n_hits, len(need.experts) - n_hits)
            for use in need.experts:
                self.of_key[(need.layer, use.expert)] += use.n_tokens
            self._prefetch.handle_need(need, self._geometry.next_layer(need.layer))
        self._uncounted.clear()
