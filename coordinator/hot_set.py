"""The policy that keeps a hot set: the experts that were used most in earlier runs.

A policy like those of `policies`, whose rules it keeps.
"""

from collections.abc import Iterable, Mapping

from coordinator.policies import IsLocked, Key, Lru, PolicyGeometry


class Static:
    """A hot set that is never evicted while another key can go; the rest is least recently used.

    The hot set is as many of the most used keys of each class as leave `n_spare_slots` to move in.
    When the pool shrinks, its least used keys become like all others.
    """

    def __init__(
        self, geometry: PolicyGeometry, usage: Mapping[Key, float], n_spare_slots: int
    ) -> None:
        self._geometry = geometry
        self._rest = Lru(geometry)
        self._n_spare_slots = n_spare_slots
        self._ranking = sorted(usage, key=lambda key: (-usage[key], key))
        self._resident: set[Key] = set()
        self.hot: frozenset[Key] = frozenset(self._hottest(geometry.slots_of_class))

    def touch(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._rest.touch(key, now)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._resident.add(key)
        if key not in self.hot:
            self._rest.admit(key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._resident.discard(key)
        self._rest.forget(key)

    def victim(self, key: Key, is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        return self._rest.victim(key, is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        before, self.hot = self.hot, frozenset(self._hottest(slots_of_class))
        for key in self.hot - before:
            self._rest.forget(key)
        for key in sorted(before - self.hot):
            if key in self._resident:
                self._rest.admit(key, now)

    def _hottest(self, slots_of_class: tuple[int, ...]) -> Iterable[Key]:
        room = [max(0, slots - self._n_spare_slots) for slots in slots_of_class]
        for key in self._ranking:
            slot_class = self._geometry.class_of_layer.get(key[0])
            if slot_class is not None and room[slot_class] > 0:
                room[slot_class] -= 1
                yield key
