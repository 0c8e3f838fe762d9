"""Experts that compute may use without asking, each until it hears that it is evicted.

An expert comes in with a lasting grant and goes when `Evicted` names it, when its layer gets a
standing grant, or when its slot does not hold it any more. The coordinator evicts only where
compute waits for a grant of the layer at hand, which it reads after the `Evicted` before it, or
between two steps: so whatever is here may be used until the next wait, for however many layers. The
header of its slot is looked at before each use: by `known`, or as a mark of `KnownExperts` where
layers are run without asking here. This module does not know what becomes of what it forgets.
"""

from collections.abc import Iterable, Sequence

from compute_worker.known_experts import KnownExperts
from compute_worker.regions import Regions
from shm.messages import Location


class LastingGrants:
    """Locations by layer and expert; the same experts are in `table`."""

    def __init__(self, table: KnownExperts, regions: Regions) -> None:
        self._table = table
        self._regions = regions
        self._of_layer: dict[int, dict[int, Location]] = {}

    def known(self, layer: int, experts: Iterable[int]) -> list[Location]:
        """Those of these experts that may be used, in order."""
        own = self._of_layer.get(layer)
        if not own:
            return []
        found = [own[expert] for expert in experts if expert in own]
        intact = [each for each in found if self._regions.is_intact(layer, each)]
        if len(intact) < len(found):  # the grant that is asked for then finds out more
            self.forget([(layer, each.expert) for each in found if each not in intact])
        return intact

    def keep(self, layer: int, locations: Sequence[Location]) -> None:
        """These were granted for longer than their layer."""
        own = self._of_layer.setdefault(layer, {})
        own.update({location.expert: location for location in locations})
        experts = [location.expert for location in locations]
        self._table.add(layer, experts, self._regions.entries(layer, locations))

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """These are evicted; most of them may never have been here."""
        for layer, expert in keys:
            if self._of_layer.get(layer, {}).pop(expert, None) is not None:
                self._table.forget(layer, [expert])

    def forget_layer(self, layer: int) -> None:
        """The layer is granted as a whole, or nothing of it is known any more."""
        self._table.forget(layer, list(self._of_layer.pop(layer, ())))
