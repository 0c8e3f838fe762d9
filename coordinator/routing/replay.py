"""Replays a routing trace: hits and misses of any policy and pool, without reading anything.

The very `Residency` of the engine decides. Around it stand a reader that answers at once and a
compute side that gives everything back, so hits, misses and victims are those of a live run with
the same pool and policy (prefetch off). `limits` has what no policy can beat, and what the page
cache would have done with the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.actions import Action, ToCompute, ToWorker
from coordinator.core.geometry import PoolGeometry
from coordinator.core.policies import Policy
from coordinator.core.residency import Residency
from coordinator.routing.trace_file import is_prompt
from shm.messages import Grant, Need, ReadSlabs, SlabsReady, SlotLease

READER = "replay"
N_FIRST_STEPS = 8  # decode steps after a prompt: what it left behind shows in their hits


@dataclass(slots=True)
class Tallied:
    """Requests of some steps, those that were hits, and the bytes of the others."""

    requests: int = 0
    hits: int = 0
    missed_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits ÷ requests; 0 without requests."""
        return self.hits / max(1, self.requests)

    def add(self, n_requests: int, n_hits: int, slab_bytes: int) -> None:
        """One more `Need`."""
        self.requests += n_requests
        self.hits += n_hits
        self.missed_bytes += (n_requests - n_hits) * slab_bytes


class Outcome:
    """Hits of a whole trace, of its decode steps, and of the first of these after each prompt."""

    def __init__(self) -> None:
        self.all, self.decode, self.first = Tallied(), Tallied(), Tallied()
        self._step = 0
        self._n_decode_steps = 0  # since the last prompt

    def add(self, need: Need, n_hits: int, slab_bytes: int) -> None:
        """One more `Need`, in the order of the trace."""
        n = len(need.experts)
        self.all.add(n, n_hits, slab_bytes)
        if is_prompt(need):
            self._n_decode_steps = 0
            return
        if need.step != self._step:
            self._step = need.step
            self._n_decode_steps += 1
        self.decode.add(n, n_hits, slab_bytes)
        if self._n_decode_steps <= N_FIRST_STEPS:
            self.first.add(n, n_hits, slab_bytes)


class Replay:
    """One pool under one policy, fed with `Need`s."""

    def __init__(self, geometry: PoolGeometry, policy: Policy) -> None:
        self.outcome = Outcome()
        self.residency = Residency(geometry, policy, standing_grants=False)
        self._slab_bytes = {
            layer: sum(n_bytes for _, _, n_bytes in geometry.ranges_of(layer, 0))
            for layer in geometry.class_of_layer
        }
        self._released: tuple[SlotLease, ...] = ()
        self._perform(self.residency.worker_ready(READER, len(geometry.class_of_slots)))

    def preload(self) -> None:
        """Where the pool holds every expert, the engine reads them all before the first step."""
        self._perform(self.residency.preload(self.residency.geometry.all_keys()))

    def add(self, need: Need) -> None:
        """One more layer of a step."""
        counters = self.residency.counters
        n_hits_before = counters.hits
        released, self._released = self._released, ()
        self._perform(self.residency.handle_release(released))
        self._perform(list(self.residency.serve(need)))
        n_hits = counters.hits - n_hits_before
        self.outcome.add(need, n_hits, self._slab_bytes[need.layer])

    def _perform(self, actions: list[Action]) -> None:
        """Answer reads at once; give experts back when somebody waits for their slots."""
        while actions:
            more: list[Action] = []
            for action in actions:
                match action:
                    case ToWorker(name, ReadSlabs(reads)):
                        for read in reads:
                            ready = SlabsReady(read.lease, 0, 0, 0, 0)
                            more += self.residency.handle_ready(name, ready)
                    case ToCompute(Grant() as grant):
                        self._released += tuple([found.lease for found in grant.locations])
                        if grant.n_waiting:
                            released, self._released = self._released, ()
                            more += self.residency.handle_release(released)
            actions = more


def replay(needs: Sequence[Need], geometry: PoolGeometry, policy: Policy) -> Outcome:
    """What the engine would have counted with this pool and policy."""
    run = Replay(geometry, policy)
    if geometry.holds_everything:
        run.preload()
    for need in needs:
        run.add(need)
    return run.outcome
