"""The policies that keep a hot set: experts that are not let go of while another can go.

They keep the rules of `policies`; the rest of the pool is least recently used.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.core.policies import IsLocked, Key, Lru, PolicyGeometry

SPARE_SLOTS_PER_ACTIVE = 2  # slots of a class that `Static` leaves to move in, per expert used
LEARNING_TOKENS = 32  # 10 tokens gave one to three points less, 64 no more (replay)
CALIBRATED_SHARE = 0.5  # of the slots; a quarter and three quarters were worse at most sizes

Room = Callable[[int], int]  # slots of a class -> how many of them the hot set may take


class Static:
    """A hot set from use counts of other runs, the most used first.

    It takes as many slots of each class as `room` says. When the pool shrinks, its least used keys
    become like all others.
    """

    def __init__(self, geometry: PolicyGeometry, usage: Mapping[Key, float], room: Room) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self._room = room
        self._rest = Lru(geometry)
        self._ranking: Sequence[Key] = ()
        self._resident: set[Key] = set()
        self.choose(usage, 0)

    def choose(self, usage: Mapping[Key, float], now: int) -> None:
        """Take the hot set from these counts."""
        self._ranking = sorted(usage, key=lambda key: (-usage[key], key))
        self.resize(self._slots_of_class, now)

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        self._rest.touch(key, now, n_tokens)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._resident.add(key)
        if key not in self.hot:
            self._rest.admit(key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._resident.discard(key)
        self._rest.forget(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        return self._rest.victim(layer, among, is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        self._slots_of_class = slots_of_class
        before, self.hot = self.hot, frozenset(self._hottest())
        for key in self.hot - before:
            self._rest.forget(key)
        for key in sorted(before - self.hot):
            if key in self._resident:
                self._rest.admit(key, now)

    def _hottest(self) -> Iterable[Key]:
        room = [max(0, self._room(n_slots)) for n_slots in self._slots_of_class]
        for key in self._ranking:
            slot_class = self._geometry.class_of_layer.get(key[0])
            if slot_class is not None and room[slot_class] > 0:
                room[slot_class] -= 1
                yield key


class Calibrated:
    """A hot set for half of the slots, learned from the beginning of this text.

    The prompt, whose uses by n tokens count √n, and the first tokens of the answer decide; then the
    set stays. With `usage` of an earlier calibration it is there from the start.
    """

    def __init__(self, geometry: PolicyGeometry, usage: Mapping[Key, float]) -> None:
        self._set = Static(geometry, usage, lambda n_slots: int(n_slots * CALIBRATED_SHARE))
        self._is_learning = not usage
        self._last_need = LEARNING_TOKENS * len(geometry.class_of_layer)
        self._counts: dict[Key, float] = {}

    @property
    def hot(self) -> frozenset[Key]:
        """See `Policy`."""
        return self._set.hot

    def touch(self, key: Key, now: int, n_tokens: int) -> None:
        """See `Policy`."""
        if self._is_learning and now > self._last_need:
            self._is_learning = False
            self._set.choose(self._counts, now)
            self._counts.clear()
        elif self._is_learning:
            self._counts[key] = self._counts.get(key, 0.0) + math.sqrt(n_tokens)
        self._set.touch(key, now, n_tokens)

    def admit(self, key: Key, now: int) -> None:
        """See `Policy`."""
        self._set.admit(key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        self._set.forget(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        return self._set.victim(layer, among, is_locked)

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        self._set.resize(slots_of_class, now)
