"""Routing of expert requests: which experts a layer finds, which are read, where and by whom.

Half of the decision core (the other half composes steps, see `requests`). It takes messages and
facts, returns actions, and does no I/O: it reads no clock, draws no random number, opens nothing.

What it guarantees, and a change must keep:

- A slot in use or being filled is never evicted.
- What compute may use without asking (a lasting grant) is evicted only where a `Need` waits for its
  answer, or between two steps, and compute is told first.
- All victims of a layer are chosen when its `Need` is handled, also for experts that must wait for
  a slot (`Placement.follow`): hits, misses and victims do not depend on the order of reads.
- A slot whose worker dies is filled again with the same key, by another worker, after the death
  is confirmed.
"""

from collections.abc import Iterator, Sequence

from coordinator.core.actions import Action, RequestsFailed, StopWith, ToCompute
from coordinator.core.adoption import Adoption, Moved
from coordinator.core.geometry import ExpertCounters, PoolGeometry, ResizeCounters
from coordinator.core.grants import Grants
from coordinator.core.guesses import Guesses
from coordinator.core.noted_uses import NotedUses
from coordinator.core.noticed import answered, coming, note_used
from coordinator.core.placement import Placement
from coordinator.core.policies import Key, Policy
from coordinator.core.prefetch import Prefetch
from coordinator.core.reads import ReadDispatch
from coordinator.core.repair import given_up, gone_in_use, read_again
from coordinator.core.resizing import Resizing
from coordinator.core.returned import Returns
from coordinator.core.seating import UNDER_WAY, find_seated, seat_layer, waited_for
from coordinator.core.served_layer import Arrival, ServedLayer
from shm.messages import (
    Abort,
    Evicted,
    Guess,
    KnownLayer,
    Need,
    ReadFailed,
    SlabsReady,
    SlotLease,
    SlotsLost,
)


class Residency:
    """Slots, policy and readers behind the messages about experts."""

    knows_hits = True

    def __init__(
        self,
        geometry: PoolGeometry,
        policy: Policy,
        *,
        standing_grants: bool,
        lasting_grants: bool = False,
        whole_layers: bool = False,
        prefetch: Prefetch | None = None,
    ) -> None:
        self.counters, self.resized = ExpertCounters(), ResizeCounters()
        self.prefetch = prefetch or Prefetch("off")
        self.geometry = geometry
        self._placement = Placement(geometry, policy)
        self.slots = self._placement.slots
        self._noted = NotedUses(geometry, self._placement, self.prefetch, self.counters)
        self.uses = self._noted.of_key
        self._whole_layers = whole_layers  # a miss reads all experts of its layer
        self._reads = ReadDispatch()
        self._returns = Returns(geometry, self._placement, self._reads, self.counters)
        self._layer: ServedLayer | None = None
        self._guesses = Guesses(geometry, self._placement, self._reads, self.prefetch)
        self._lasting = lasting_grants and not whole_layers
        self._grants = Grants(geometry, self.slots, standing=standing_grants, lasting=self._lasting)
        self._adoption = Adoption(geometry, self._placement, self._grants, self._reads)
        parts = (geometry, self._placement, self._grants, self._adoption, self._reads)
        self._resizing = Resizing(*parts, self.resized, asks_first=self._lasting)

    # Readers

    def worker_ready(self, name: str, credit: int) -> list[Action]:
        """A reader can take up to `credit` slabs at once."""
        self._reads.add_reader(name, credit)
        return self._reads.dispatch()

    def worker_condemned(self, name: str) -> list[Action]:
        """The worker will be killed: what it answers from now on is void."""
        for read in self._reads.condemn_reader(name):
            self.slots.condemn(self.slots.slots[read.lease.slot])
        return []

    def worker_died(self, name: str) -> list[Action]:
        """The worker is dead and reaped: its slots are filled again by others."""
        again = [self._placement.lease_again(r.lease) for r in self._reads.remove_reader(name)]
        self._reads.push_front([self.geometry.read_of(slot) for slot in again])
        return self._reads.dispatch()

    @property
    def n_loading(self) -> int:
        """Slabs queued or under way."""
        return self._reads.n_loading

    def n_reading(self, name: str) -> int:
        """Slabs that a reader was told to read and has not answered for."""
        return len(self._reads.under_way(name))

    @property
    def n_unanswered(self) -> int:
        """Slabs that compute had from their readers, which have not told us yet."""
        return self._reads.n_used

    # Layers

    def serve(self, need: Need) -> Iterator[Action]:
        """Reads first, so that the disk begins while the grant is decided (see `Core.decide`)."""
        self._returns.take(need.released, self._layer)
        self.slots.unpin_all()  # what was granted twice is given back once
        for known in need.earlier:
            self._noted.touch_known(known)
        self._layer = layer = ServedLayer(need)
        hits, misses = find_seated(self.slots, layer, layer.uses_in_order())
        self._noted.touch(layer, len(hits))
        if failed := gone_in_use(self.slots, layer):
            yield from failed
            return
        if self.prefetch.may_act:  # what is guessed now is not this layer's victim
            self._noted.count()
            self._guesses.expect()
        seats = (self._placement, self.geometry, layer, hits, misses, self._noted.n_needs)
        loading = seat_layer(*seats, whole_layers=self._whole_layers)
        self._reads.demand(waited_for(self.slots, layer), map(self.geometry.read_of, loading))
        yield from self._reads.dispatch()
        retiring = self._resizing.may_evict()
        if not layer.n_waiting:
            self._guesses.make_room()
        on_the_way = coming(self.slots, self._reads, layer)
        grant = self._grants.first(layer, hits, on_the_way, self._gone(layer))
        if grant.standing:
            for slot in hits:
                if slot.key and slot.key[1] not in need.known:  # these are given back
                    self.slots.unpin(slot)
        guesses = self._guesses.read(layer, self.n_needs)
        yield from (ToCompute(grant), *retiring, *guesses)

    def handle_guess(self, guess: Guess) -> list[Action]:
        """Compute goes through layers without asking, and will probably miss these soon."""
        self.prefetch.handle_guess(guess.layer, guess.experts)
        self._guesses.expect()
        return self._guesses.read(self._layer, self.n_needs)

    def note_known(self, known: KnownLayer) -> None:
        """Compute was done with a layer without asking: it counts like any other."""
        self._noted.touch_known(known)

    @property
    def n_needs(self) -> int:
        """Layers that used experts since the start: the clock of all decisions."""
        return self._noted.n_needs

    def handle_release(self, released: tuple[SlotLease, ...]) -> list[Action]:
        """Slots come free; experts that wait for them are read."""
        self._returns.take(released, self._layer)
        return self._reads.dispatch()

    def _gone(self, layer: ServedLayer | None = None) -> tuple[Key, ...]:
        """Count who had to go; of these, and of what is not there for long, compute must hear."""
        self._noted.count()
        evicted = self._placement.take_evicted()
        self.counters.evictions += len(evicted)
        self.prefetch.note_evicted(evicted)
        gone = (*evicted, *(layer.in_waves() if layer else ()))
        return gone if self._lasting else ()

    def _tell_evictions(self) -> list[Action]:
        return [ToCompute(Evicted(gone))] if (gone := self._gone()) else []

    def handle_lost(self, lost: SlotsLost) -> list[Action]:
        """Something wrote over slots: they are filled again with what they should hold."""
        for slot in filter(None, map(self.slots.current, lost.lost)):
            note_used(slot, self.slots, self._reads, self._layer, self.counters)
        again = read_again(lost, self.slots, self._layer)
        self._reads.push_front([self.geometry.read_of(slot) for slot in again])
        self.counters.slots_lost += len(again)
        return self._reads.dispatch() + given_up(self._layer)

    # Answers of the readers

    def handle_ready(self, name: str, ready: SlabsReady) -> list[Action]:
        """A slab lies in its slot: grant it if a layer waits for it."""
        if self._reads.was_used(name, ready.lease):
            self.counters.add_cost(ready)
            return self._guesses.read(self._layer, self.n_needs)
        slot = answered(self.slots, self._reads, name, ready.lease, self.counters)
        if slot is None:
            return []
        self.slots.ready(slot)
        self._grants.note_ready(slot)
        self.counters.add_read(ready)
        layer = self._layer
        actions: list[Action] = []
        if layer and slot.key is not None and layer.need.layer == slot.key[0]:
            arrived = layer.arrived(slot, ready)
            actions = [] if layer.hears_of(ready) else self._granted(layer, arrived)
        self._returns.hand_over(slot, layer)
        return actions + self._guesses.read(self._layer, self.n_needs)

    def _granted(self, layer: ServedLayer, arrived: list[Arrival]) -> list[Action]:
        return [ToCompute(self._grants.of_read(layer, slot, span)) for slot, span in arrived]

    def handle_failed(self, name: str, failed: ReadFailed) -> list[Action]:
        """A slab cannot be read: the step that waits for it ends, the engine goes on."""
        slot = answered(self.slots, self._reads, name, failed.lease, self.counters)
        if slot is None:
            return []
        assert slot.key is not None
        number, expert = slot.key
        self.counters.reads_failed += 1
        self._placement.fail(slot)
        was_told = self._lasting and slot.since < slot.generation  # by a reader that died since
        gone: list[Action] = [ToCompute(Evicted(((number, expert),)))] if was_told else []
        if failed.model_changed:
            return [StopWith(3, f"model changed on disk: {failed.text}; restart with the new file")]
        layer = self._layer
        if layer and layer.need.layer == number and expert in layer.missing:
            why = f"layer {number}, expert {expert}: {failed.text}"
            abort = ToCompute(Abort(layer.need.step))
            return [*gone, *self._reads.dispatch(), RequestsFailed(why), abort]
        self._returns.hand_over(slot, layer)
        actions = gone + self._reads.dispatch()
        if layer and layer.need.layer == number:
            actions += self._granted(layer, layer.without(expert))
        return actions

    # Steps

    def end_layer(self, released: tuple[SlotLease, ...]) -> list[Action]:
        """The step is over: nothing of its last layer is needed any more."""
        self._returns.take(released, self._layer)
        return self._step_over()

    def abort_layer(self) -> list[Action]:
        """The step ended early: unpin all that its layer holds, forget what waits for a slot.

        Reads that are under way go on; their slots become ordinary residents.
        """
        if layer := self._layer:
            self._placement.forget_followers(layer.need.layer, layer.takes_over, self.n_needs)
        self.slots.unpin_all()
        return self._step_over()

    def compute_ready(self, *, adopts: bool) -> None:
        """Compute is up, and may adopt what stays for good or not (see `adoption`)."""
        self._adoption.compute_ready(adopts=adopts)

    def settle(self) -> list[Action]:
        """No step runs: what stays for good goes on its way to where it will stay."""
        return self._adoption.next_part()

    @property
    def n_to_settle(self) -> int:
        """Experts to be read or moved before everything is where it stays, as far as is known."""
        return self.n_loading or self._adoption.n_to_move

    def handle_moved(self, moved: Moved, *, is_stepping: bool) -> list[Action]:
        """Compute has experts in memory of its own, or has them no more."""
        actions, lacking = self._adoption.handle(moved, self.n_needs)
        freed = self._resizing.more_is_free(is_stepping=is_stepping)
        return actions + self._tell_evictions() + freed + self.preload(lacking)

    def compute_died(self) -> list[Action]:
        """Nothing is granted any more. The pool stays; what compute had is read again."""
        self._reads.compute_died()
        lost = self._adoption.compute_died()
        return self.abort_layer() + self.preload(lost)

    def resize(self, slots_of_class: tuple[int, ...], *, is_stepping: bool) -> list[Action]:
        """Use so many slots of each class from now on (see `resizing`)."""
        actions = self._resizing.aim(slots_of_class, self.n_needs, is_stepping=is_stepping)
        return self._tell_evictions() + actions + self.preload(self._grants.lacking())

    def _step_over(self) -> list[Action]:
        self._layer = None
        actions = self._resizing.step_over()
        self._guesses.make_room()
        return self._tell_evictions() + actions + self._reads.dispatch()

    def preload(self, keys: Sequence[Key]) -> list[Action]:
        """Read these into free slots, as far as those go, before anybody waits for them."""
        leased = self._placement.fill_free(keys, self.n_needs)
        self._reads.push_ahead(self.geometry.read_of(slot) for slot in leased)
        return self._reads.dispatch()

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        self.slots.check()
        self._reads.check()
        self._resizing.check()
        assert self.n_loading == sum(map(self.slots.count, UNDER_WAY))
