"""Experts that compute may use without asking, each until it hears that it is evicted.

An expert comes in with a lasting grant and goes when `Evicted` names it, when its layer gets a
standing grant, or when its slot does not hold it any more. The coordinator evicts only where
compute waits for a grant of the layer at hand, which it reads after the `Evicted` before it, or
between two steps: so whatever is here may be used until the end of the layer. This module does not
know what becomes of what it forgets.
"""

from collections.abc import Iterable, Sequence

from compute_worker.regions import Regions
from shm.messages import Location


class LastingGrants:
    """Locations by layer and expert."""

    def __init__(self, regions: Regions) -> None:
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
            for location in found:
                if location not in intact:
                    del own[location.expert]
        return intact

    def keep(self, layer: int, locations: Sequence[Location]) -> None:
        """These were granted for longer than their layer."""
        own = self._of_layer.setdefault(layer, {})
        for location in locations:
            own[location.expert] = location

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """These are evicted; most of them may never have been here."""
        for layer, expert in keys:
            self._of_layer.get(layer, {}).pop(expert, None)

    def forget_layer(self, layer: int) -> None:
        """The layer is granted as a whole, or nothing of it is known any more."""
        self._of_layer.pop(layer, None)
