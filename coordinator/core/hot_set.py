"""The policies that keep a hot set: experts that are not let go of while another can go.

They keep the rules of `policies`; the rest of the pool is least recently used.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.core.policies import IsLocked, Key, Lru, PolicyGeometry

SPARE_SLOTS_PER_ACTIVE = 2  # slots of a class that `Static` leaves to move in, per expert used
LEARNING_TOKENS = 32  # 10 tokens gave one to three points less, 64 no more (replay)
CALIBRATED_SHARE = 0.5  # of the slots; a quarter and three quarters were worse at most sizes

Room = Callable[[int], int]  # slots of a class -> how many of them the hot set may take


class Static:
    """A hot set from use counts of other runs, the most used first.

    It takes as many slots of each class as `room` says. When the pool shrinks, its least used keys
    become like all others. Compute may have the content of many slots in memory of its own: then
    what is left may hold more of the hot set than there is `room` for, and its least used keys go
    where no others can.
    """

    def __init__(self, geometry: PolicyGeometry, usage: Mapping[Key, float], room: Room) -> None:
        self.hot: frozenset[Key] = frozenset()
        self._geometry = geometry
        self._slots_of_class = geometry.slots_of_class
        self._room = room
        self._rest = Lru(geometry)
        self._ranking: Sequence[Key] = ()
        self._resident: set[Key] = set()
        self._n_resident: Counter[int] = Counter()  # by class
        self._n_hot: Counter[int] = Counter()  # of them
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
        if key not in self._resident:
            self._resident.add(key)
            self._count(key, 1)
        if key not in self.hot:
            self._rest.admit(key, now)

    def forget(self, key: Key) -> None:
        """See `Policy`."""
        if key in self._resident:
            self._resident.remove(key)
            self._count(key, -1)
        self._rest.forget(key)

    def victim(self, layer: int, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """See `Policy`."""
        found = self._rest.victim(layer, among, is_locked)
        slot_class = self._geometry.class_of_layer[layer]
        if found is None and self._n_hot[slot_class] > self._room_in(self._n_resident[slot_class]):
            found = self._coldest(among, is_locked)
        return found

    def resize(self, slots_of_class: tuple[int, ...], now: int) -> None:
        """See `Policy`."""
        self._slots_of_class = slots_of_class
        before, self.hot = self.hot, frozenset(self._hottest())
        for key in self.hot - before:
            self._rest.forget(key)
        for key in sorted(before - self.hot):
            if key in self._resident:
                self._rest.admit(key, now)
        class_of_layer = self._geometry.class_of_layer
        self._n_hot = Counter(class_of_layer[key[0]] for key in self.hot & self._resident)

    def _count(self, key: Key, change: int) -> None:
        slot_class = self._geometry.class_of_layer[key[0]]
        self._n_resident[slot_class] += change
        if key in self.hot:
            self._n_hot[slot_class] += change

    def _coldest(self, among: Sequence[int], is_locked: IsLocked) -> Key | None:
        """The least used of the hot set that may go."""
        held = self.hot & self._resident
        for key in reversed(self._ranking):
            if key in held and key[0] in among and not is_locked(key):
                return key
        return None

    def _room_in(self, n_slots: int) -> int:
        return max(0, self._room(n_slots))

    def _hottest(self) -> Iterable[Key]:
        room = [self._room_in(n_slots) for n_slots in self._slots_of_class]
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
