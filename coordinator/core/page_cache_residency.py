"""Routing of expert requests where the page cache is the only cache: the pool's `Residency` without
slots. Part of the decision core: no I/O, no clock.

Every expert lies where its file is mapped, and may always be computed there. Readers only warm: an
expert is granted when its reader answered, so that compute does not fault for it. Whether the pages
were there, and whether they still are, only the kernel knows: there are no hits and no misses, no
victims and nothing to release. Without readers that warm, a layer is granted at once and compute
takes the faults: the plain baseline.

Leases stand for experts, not for slots: ``slot`` counts them through all layers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from coordinator.core.actions import Action, RequestsFailed, StopWith, ToCompute
from coordinator.core.geometry import ExpertCounters, PoolGeometry, ResizeCounters
from coordinator.core.guesses import MAX_READ_AT_ONCE
from coordinator.core.policies import Key
from coordinator.core.prefetch import Prefetch
from coordinator.core.reads import ReadDispatch
from coordinator.core.slots import SlotTable
from shm.messages import (
    Abort,
    Adopted,
    Dropped,
    Grant,
    Guess,
    KnownLayer,
    Location,
    Need,
    ReadFailed,
    ReadRange,
    ReadSpan,
    SlabRead,
    SlabsReady,
    SlotLease,
    SlotsLost,
)


class PageCacheResidency:
    """What `Residency` is to the core, with the kernel in the place of slots and policy.

    `geometry` has no slots; `starts` says where each file lies among the mapped ones.
    """

    knows_hits = False

    def __init__(
        self,
        geometry: PoolGeometry,
        starts: Sequence[int],
        *,
        warms: bool,
        standing_grants: bool,
        prefetch: Prefetch | None = None,
    ) -> None:
        self.counters, self.resized = ExpertCounters(), ResizeCounters()
        self.n_needs = 0
        self.uses: Counter[Key] = Counter()
        self.prefetch = prefetch or Prefetch("off")
        self.geometry = geometry
        self.slots = SlotTable([])
        self._starts = starts
        self._warms = warms
        self._standing_grants = standing_grants
        self._layers = sorted(geometry.class_of_layer)
        self._reads = ReadDispatch()
        self._warming: set[Key] = set()  # queued or under way
        self._need: Need | None = None
        self._missing: set[int] = set()  # experts of the need that were not granted yet
        self._guesses: list[Key] = []  # warmed ahead for the next layer

    # Readers

    def worker_ready(self, name: str, credit: int) -> list[Action]:
        """See `Residency`."""
        self._reads.add_reader(name, credit)
        return self._reads.dispatch()

    def worker_condemned(self, name: str) -> list[Action]:
        """See `Residency`. Whatever it still does, it writes nowhere."""
        return []

    def worker_died(self, name: str) -> list[Action]:
        """See `Residency`: others warm what it left."""
        self._reads.push_front(self._reads.remove_reader(name))
        return self._reads.dispatch()

    @property
    def n_loading(self) -> int:
        """Experts queued or under way."""
        return len(self._warming)

    def n_reading(self, name: str) -> int:
        """Experts that a reader was told to warm and has not answered for."""
        return len(self._reads.under_way(name))

    @property
    def n_unanswered(self) -> int:
        """See `Residency`: no reader tells compute."""
        return 0

    # Layers

    def serve(self, need: Need) -> list[Action]:
        """Have the experts warmed; without readers grant them at once."""
        self.n_needs += 1
        self.counters.requests += len(need.experts)
        experts = {use.expert for use in need.experts}
        for use in need.experts:
            self.uses[need.layer, use.expert] += use.n_tokens
        self._score_guesses(need.layer, experts)
        self.prefetch.handle_need(need, self.geometry.next_layer(need.layer))
        if not self._warms:
            return [ToCompute(self._grant_at_once(need, experts))]
        self._need, self._missing = need, experts
        keys = [(need.layer, expert) for expert in sorted(experts)]
        self._reads.demand(lambda: {self._lease(key).slot for key in keys}, self._to_warm(keys))
        return self._reads.dispatch() + self._warm_guesses()

    def handle_guess(self, guess: Guess) -> list[Action]:
        """See `Residency`: no layer goes without asking, but those that are mapped for good."""
        return []

    def handle_release(self, released: tuple[SlotLease, ...]) -> list[Action]:
        """See `Residency`: nobody waits for anything."""
        return []

    def handle_lost(self, lost: SlotsLost) -> list[Action]:
        """See `Residency`: there are no slots to lose."""
        raise AssertionError(f"no slot can be lost: {lost}")

    def _grant_at_once(self, need: Need, experts: set[int]) -> Grant:
        """The whole layer for good: no message is needed after it."""
        layer = need.layer
        if self._standing_grants:
            experts = set(range(self.geometry.n_experts))
        found = [self._location((layer, expert)) for expert in sorted(experts)]
        return Grant(layer, tuple(found), (), 0, self._standing_grants, need.step)

    def _score_guesses(self, layer: int, experts: set[int]) -> None:
        wasted = [key for key in self._guesses if key[0] == layer and key[1] not in experts]
        self.prefetch.note_evicted(wasted)
        self._guesses.clear()

    def _to_warm(self, keys: Iterable[Key]) -> list[SlabRead]:
        """Reads of those that nobody reads yet."""
        new = [key for key in keys if key not in self._warming]
        self._warming.update(new)
        return [self._read_of(key) for key in new]

    def _warm_guesses(self) -> list[Action]:
        """Use idle readers for experts that the next layer will probably need."""
        if self._warming:
            return []
        new = [key for key in self.prefetch.wanted() if key not in self._guesses]
        for key in new[:MAX_READ_AT_ONCE]:
            self._guesses.append(key)
            self.prefetch.note_issued(key)
            self._reads.push_ahead(self._to_warm([key]))
        return self._reads.dispatch()

    # Answers of the readers

    def handle_ready(self, name: str, ready: SlabsReady) -> list[Action]:
        """An expert is warm: grant it if a layer waits for it."""
        key = self._answered(name, ready.lease)
        if key is None:
            return []
        self.counters.reads += 1
        self.counters.bytes_read += ready.bytes_read
        self.counters.read_ns += ready.stop_ns - ready.start_ns
        actions: list[Action] = []
        if self._is_awaited(key):
            assert self._need is not None
            self._missing.remove(key[1])
            span = ReadSpan(ready.start_ns, ready.stop_ns)
            grant = Grant(key[0], (self._location(key),), (span,), 0, False, self._need.step)
            actions.append(ToCompute(grant))
        return actions + self._reads.dispatch() + self._warm_guesses()

    def handle_failed(self, name: str, failed: ReadFailed) -> list[Action]:
        """See `Residency`. Compute would die of the pages that a reader could not have."""
        key = self._answered(name, failed.lease)
        if key is None:
            return []
        self.counters.reads_failed += 1
        if failed.model_changed:
            return [StopWith(3, f"model changed on disk: {failed.text}; restart with the new file")]
        actions = self._reads.dispatch()
        if self._is_awaited(key):
            assert self._need is not None
            self._missing.remove(key[1])
            text = f"layer {key[0]}, expert {key[1]}: {failed.text}"
            actions += [RequestsFailed(text), ToCompute(Abort(self._need.step))]
        return actions

    def _answered(self, name: str, lease: SlotLease) -> Key | None:
        if not self._reads.answered(name, lease):
            self.counters.stale_answers += 1
            return None
        place, expert = divmod(lease.slot, self.geometry.n_experts)
        key = (self._layers[place], expert)
        self._warming.remove(key)
        return key

    def _is_awaited(self, key: Key) -> bool:
        return self._need is not None and self._need.layer == key[0] and key[1] in self._missing

    # Steps

    def end_layer(self, released: tuple[SlotLease, ...]) -> list[Action]:
        """See `Residency`."""
        return self.abort_layer()

    def abort_layer(self) -> list[Action]:
        """See `Residency`. What is under way goes on, for whoever needs it next."""
        self._need, self._missing = None, set()
        return self._reads.dispatch()

    def compute_ready(self, *, adopts: bool) -> None:
        """See `Residency`. There is no pool to adopt anything from."""

    def settle(self) -> list[Action]:
        """See `Residency`. Everything stays where it is."""
        return []

    def note_known(self, known: KnownLayer) -> None:
        """See `Residency`."""
        raise AssertionError(f"no grant lasts here: {known}")

    def handle_moved(self, moved: Adopted | Dropped, *, is_stepping: bool) -> list[Action]:
        """See `Residency`."""
        raise AssertionError(f"nothing was adopted: {moved}")

    @property
    def n_to_settle(self) -> int:
        """See `Residency`."""
        return self.n_loading

    def compute_died(self) -> list[Action]:
        """See `Residency`."""
        return self.abort_layer()

    def resize(self, slots_of_class: tuple[int, ...], *, is_stepping: bool) -> list[Action]:
        """The kernel takes back what it needs."""
        return []

    def preload(self, keys: Sequence[Key]) -> list[Action]:
        """See `Residency`. The kernel decides what stays: nothing is read ahead of time."""
        return []

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        self._reads.check()
        assert len(self._warming) == self._reads.n_loading
        assert all((self._need.layer, e) in self._warming for e in self._missing if self._need)

    # Where experts lie

    def _location(self, key: Key) -> Location:
        """The region is that of the first file that has a part of the expert."""
        ranges = self.geometry.ranges_of(*key)
        first = min(file for file, _, _ in ranges)
        gate, up, down = (
            self._starts[file] - self._starts[first] + offset for file, offset, _ in ranges
        )
        return Location(key[1], self._lease(key), 1 + first, gate, up, down)

    def _read_of(self, key: Key) -> SlabRead:
        ranges = self.geometry.reads_of(*key)
        found = tuple(ReadRange(file, offset, n_bytes, 0) for file, offset, n_bytes in ranges)
        return SlabRead(self._lease(key), *key, found)

    def _lease(self, key: Key) -> SlotLease:
        return SlotLease(self._layers.index(key[0]) * self.geometry.n_experts + key[1], 0)
