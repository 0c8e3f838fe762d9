"""The policies by name: the one table that setup, replay and the command line's choices share."""

from collections.abc import Callable, Mapping

from coordinator.core.frequency import Lfu
from coordinator.core.hot_set import SPARE_SLOTS_PER_ACTIVE, Calibrated, Static
from coordinator.core.policies import Key, LayerLru, Lru, Policy, PolicyGeometry, Slru

Counts = Mapping[Key, float]  # uses in earlier runs or in other texts
Make = Callable[[PolicyGeometry, Counts, int], Policy]  # geometry, counts, experts used per token


def _static(geometry: PolicyGeometry, counts: Counts, n_active: int) -> Policy:
    return Static(geometry, counts, lambda n_slots: n_slots - SPARE_SLOTS_PER_ACTIVE * n_active)


POLICIES: Mapping[str, Make] = {
    "lru": lambda geometry, counts, n_active: Lru(geometry),
    "layer-lru": lambda geometry, counts, n_active: LayerLru(geometry),
    "lfu": lambda geometry, counts, n_active: Lfu(geometry, counts, n_active),
    "slru": lambda geometry, counts, n_active: Slru(geometry),
    "static": _static,
    "calibrated": lambda geometry, counts, n_active: Calibrated(geometry, counts),
    "imatrix": lambda geometry, counts, n_active: Lfu(geometry, counts, n_active),
}


def make_policy(name: str, geometry: PolicyGeometry, counts: Counts, n_active: int) -> Policy:
    """A policy for one pool."""
    return POLICIES[name](geometry, counts, n_active)
