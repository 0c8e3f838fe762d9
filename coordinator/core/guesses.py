"""Reads what the next layer will probably need, while the disk idles.

Part of the decision core. What to guess, and whether it pays, is `Prefetch`'s business; here is
where guesses go. Rule to keep: a guess evicts nobody when it is read. Compute uses experts that it
was granted without asking, so who has to go for guesses goes where compute waits for an answer or
between two steps (`make_room`), and is told with the layer's other evictions.
"""

from collections import Counter

from coordinator.core.actions import Action
from coordinator.core.geometry import PoolGeometry
from coordinator.core.placement import Placement
from coordinator.core.prefetch import Prefetch
from coordinator.core.reads import ReadDispatch
from coordinator.core.served_layer import ServedLayer
from coordinator.core.slots import Slot, SlotState

MAX_READ_AT_ONCE = 2  # a demand read may have to wait for these
MAX_AHEAD_READ_AT_ONCE = 4  # these are needed in any case
# Free slots of each class: until compute waits again it may go through several layers
N_ROOM = 4
SLOTS_PER_ROOM = 8  # a small pool gives up fewer


class Guesses:
    """Slots and reads for guesses."""

    def __init__(
        self,
        geometry: PoolGeometry,
        placement: Placement,
        reads: ReadDispatch,
        prefetch: Prefetch,
    ) -> None:
        self._geometry = geometry
        self._placement = placement
        self._slots = placement.slots
        self._reads = reads
        self._prefetch = prefetch
        n_layers = Counter(geometry.class_of_layer.values())
        self._n_experts_of_class = {c: n * geometry.n_experts for c, n in n_layers.items()}

    def expect(self) -> None:
        """What is guessed now is not evicted before the guess turns out to be wrong."""
        self._placement.expect((*self._prefetch.ahead(), *self._prefetch.wanted()))

    def make_room(self) -> None:
        """Evict so many that the next guesses find free slots."""
        missing = [key for key in self._prefetch.ahead() if self._slots.find(key) is None]
        if missing:
            self._make_room_ahead(missing[0][0], len(missing))
        if not self._prefetch.is_acting:
            return
        for slot_class, n_slots in enumerate(self._slots.usable_of_class()):
            if n_slots >= self._n_experts_of_class[slot_class]:
                continue  # nothing of the class is ever missing
            n_wanted = min(N_ROOM, n_slots // SLOTS_PER_ROOM)
            while self._slots.n_free(slot_class) < n_wanted:
                if not self._placement.clear(slot_class):
                    break

    def _make_room_ahead(self, layer: int, n_wanted: int) -> None:
        """For a layer that a prompt will need."""
        slot_class = self._geometry.class_of_layer[layer]
        while self._slots.n_free(slot_class) < n_wanted:
            if not self._placement.clear_for(layer):
                break

    def read(self, layer: ServedLayer | None, now: int) -> list[Action]:
        """Fill free slots with guesses, if nothing else is read; `layer` is the one at hand."""
        if layer is None or not layer.n_waiting:
            self._reads.push_ahead(self._geometry.read_of(slot) for slot in self._seat(now))
        return self._reads.dispatch()

    def _seat(self, now: int) -> list[Slot]:
        keys = (*self._prefetch.ahead(), *self._prefetch.wanted())
        n_most = MAX_AHEAD_READ_AT_ONCE if self._prefetch.ahead() else MAX_READ_AT_ONCE
        n_more = n_most - self._reads.n_loading
        if not keys or n_more <= 0 or self._reads.n_loading > self._n_under_way():
            return []
        seated: list[Slot] = []
        for key in keys:
            slot = self._slots.take_free(self._geometry.class_of_layer[key[0]])
            if slot is None or len(seated) == n_more:
                break
            if self._slots.find(key) is None:
                seated.append(self._placement.lease(slot, key, now))
                self._prefetch.note_issued(key)
        return seated

    def _n_under_way(self) -> int:
        found = map(self._slots.find, self._prefetch.unused)
        return sum(1 for slot in found if slot and slot.state is SlotState.LOADING)
