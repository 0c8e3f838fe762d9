"""A compute worker and readers made of nothing, to drive the decision core in tests.

The readers complete their reads in an order that a seed decides; the compute worker releases
experts as they are granted. What the core decided is recorded.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from coordinator.core.actions import Action, Deliver, Ended, ToCompute, ToWorker
from coordinator.core.geometry import PoolGeometry
from coordinator.core.policies import Lru, Policy, PolicyGeometry
from coordinator.core.prefetch import Prefetch
from coordinator.core.requests import Requests
from coordinator.core.residency import Residency
from coordinator.core.schedule import Schedule
from coordinator.core.slots import SlotState
from coordinator.core.state import (
    Core,
    Event,
    FromCompute,
    FromReader,
    ReaderCondemned,
    ReaderDied,
    ReaderReady,
)
from shm.messages import (
    Abort,
    Evicted,
    ExpertUse,
    Grant,
    Location,
    Need,
    ReadSlabs,
    ReadSpan,
    Release,
    SlabNotice,
    SlabRead,
    SlabsReady,
    SlotLease,
    SlotsLost,
    StepDone,
    StepTimes,
)

NO_TIMES = StepTimes(0, 0, 0, 0, 0, 0)
SLAB_BYTES = 3000


def geometry(n_layers: int, n_experts: int, n_slots: int) -> PoolGeometry:
    """One slot class; slabs of three ranges that begin anywhere."""

    def ranges_of(layer: int, expert: int) -> tuple[tuple[int, int, int], ...]:
        start = (layer * n_experts + expert) * SLAB_BYTES
        return tuple((0, start + part * 1000, 1000) for part in range(3))

    windows = [
        (slot * 30_000, slot * 30_000 + 10_000, slot * 30_000 + 20_000) for slot in range(n_slots)
    ]
    class_of_layer = dict.fromkeys(range(n_layers), 0)
    return PoolGeometry(
        windows,
        [0] * n_slots,
        class_of_layer,
        n_experts,
        ranges_of,
        4096,
        part_bytes=3 * SLAB_BYTES,
    )


def policy_geometry(n_layers: int, n_slots: int) -> PolicyGeometry:
    """The policy's view of `geometry`."""
    return PolicyGeometry(dict.fromkeys(range(n_layers), 0), (n_slots,))


@dataclass
class Engine:
    """The core with simulated processes around it."""

    core: Core
    rng: random.Random
    credit: int = 2
    inbox: list[Any] = field(default_factory=list)  # of compute
    under_way: dict[str, list[SlabRead]] = field(default_factory=dict)
    delivered: list[Any] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    victims: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    n_deaths: int = 0
    n_lost: int = 0
    notice_probability: float = 0.0  # that a reader tells compute, and answers some time later
    late: list[tuple[str, SlabsReady]] = field(default_factory=list)
    told: set[SlotLease] = field(default_factory=set)  # to compute, before it was granted
    n_used_early: int = 0  # computed before its reader's answer came
    evicted: list[tuple[int, int]] = field(default_factory=list)  # as compute was told

    def handle(self, event: Event) -> list[Action]:
        """One event through the core, its actions performed, its invariants checked."""
        actions = self.core.handle(event)
        self.core.check()
        for action in actions:
            match action:
                case ToCompute(message):
                    self.inbox.append(message)
                case ToWorker(name, ReadSlabs(reads)):
                    self.under_way[name].extend(reads)
                    self.victims += [(read.lease.slot, (read.layer, read.expert)) for read in reads]
                case Deliver(sampled):
                    self.delivered.extend(sampled)
                case Ended():
                    self.ended.append(action)
        return actions

    def start_readers(self, n: int) -> None:
        """Readers io0 … io(n-1)."""
        for number in range(n):
            self.under_way[f"io{number}"] = []
            self.handle(ReaderReady(f"io{number}", self.credit))

    def complete_some_read(self, kill_probability: float = 0.0) -> None:
        """Some read under way ends, or its reader is killed and replaced."""
        busy = [name for name, reads in self.under_way.items() if reads]
        assert busy, "compute waits and nothing is being read"
        name = self.rng.choice(busy)
        if self.rng.random() < kill_probability:
            self.kill(name)
            return
        reads = self.under_way[name]
        read = reads.pop(self.rng.randrange(len(reads)))
        if self.rng.random() < self.notice_probability:
            self.inbox.append(SlabNotice(read.lease, ReadSpan(1, 2)))
            self.late.append((name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0, noticed=True)))
        else:
            self.handle(FromReader(name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0)))

    def answer_late(self, n_left: int = 0) -> None:
        """Readers answer for what they told compute long ago, in order, until `n_left` are left."""
        while len(self.late) > n_left:
            name, ready = self.late.pop(0)
            self.handle(FromReader(name, ready))

    def complete_all_reads(self) -> None:
        """All reads under way end, and those that follow from that."""
        while any(self.under_way.values()):
            self.complete_some_read()

    def kill(self, name: str) -> None:
        """A reader dies, answers late, and a new one takes its name."""
        self.n_deaths += 1
        self.late = [(other, ready) for other, ready in self.late if other != name]
        lost = self.under_way[name]
        self.under_way[name] = []
        if self.rng.random() < 0.5:
            self.handle(ReaderCondemned(name))
            for read in lost:
                assert self.core.residency.slots.slots[read.lease.slot].state is SlotState.CONDEMNED
        self.handle(ReaderDied(name))
        for read in lost:
            self.handle(FromReader(name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0)))
        self.handle(ReaderReady(name, self.credit))

    def run_layer(
        self, need: Need, kill_probability: float = 0.0, lose_probability: float = 0.0
    ) -> tuple[list[int], tuple[SlotLease, ...]]:
        """Send a need, compute what is granted; returns experts in order and leases still held.

        Slots that were granted may be found written over.
        """
        self.handle(FromCompute(need))
        wanted = {use.expert for use in need.experts} - set(need.known)
        computed: list[int] = []
        unreleased: list[SlotLease] = []
        on_the_way: dict[SlotLease, Location] = {}
        n_waiting = 0
        while wanted:
            while not self.inbox:
                if self.late and self.rng.random() < 0.5:
                    self.answer_late(len(self.late) - 1)
                elif any(self.under_way.values()):
                    self.complete_some_read(kill_probability)
                else:
                    self.answer_late()
            message = self.inbox.pop(0)
            assert not isinstance(message, Abort)
            if isinstance(message, Evicted):
                self.evicted += message.keys
            elif isinstance(message, Grant):
                self.evicted += message.evicted
            there, stands = self._there(message, need, on_the_way)
            if isinstance(message, Grant) and message.layer == need.layer:
                n_waiting = message.n_waiting
            lost = [each for each in there if self.rng.random() < lose_probability]
            if lost:
                leases = tuple(each.lease for each in lost)
                self.handle(FromCompute(SlotsLost(need.layer, leases)))
                self.n_lost += len(lost)
            for location in there:
                if location in lost:
                    continue
                if location.expert not in wanted:
                    continue
                wanted.remove(location.expert)
                computed.append(location.expert)
                if not stands:
                    unreleased.append(location.lease)
            if n_waiting and unreleased:
                self.handle(FromCompute(Release(tuple(unreleased))))
                unreleased = []
        return computed, tuple(unreleased)

    def _there(
        self, message: Any, need: Need, on_the_way: dict[SlotLease, Location]
    ) -> tuple[list[Location], bool]:
        """What may be computed because of a message, and whether it stands."""
        slots = self.core.residency.slots.slots
        if isinstance(message, SlabNotice):
            location = on_the_way.pop(message.lease, None)
            if location is None:
                self.told.add(message.lease)
                return [], False
            slot = slots[location.lease.slot]
            assert slot.key == (need.layer, location.expert)
            self.n_used_early += slot.state is SlotState.LOADING
            return [location], False
        if not isinstance(message, Grant) or message.layer != need.layer:
            return [], False
        for location in message.locations:
            slot = slots[location.lease.slot]
            assert slot.key == (need.layer, location.expert)
            assert slot.state is SlotState.READY
        landed = [each for each in message.on_the_way if each.lease in self.told]
        on_the_way |= {each.lease: each for each in message.on_the_way if each not in landed}
        return [*message.locations, *landed], message.standing


def engine(
    n_layers: int,
    n_experts: int,
    n_slots: int,
    *,
    policy: Policy | None = None,
    seed: int = 0,
    n_readers: int = 2,
    credit: int = 2,
    schedule: Schedule | None = None,
    standing_grants: bool = True,
    lasting_grants: bool = False,
    prefetch: Prefetch | None = None,
    whole_layers: bool = False,
    notice_probability: float = 0.0,
) -> Engine:
    """A core with `n_readers` simulated readers."""
    shape = geometry(n_layers, n_experts, n_slots)
    chosen = policy or Lru(policy_geometry(n_layers, n_slots))
    residency = Residency(
        shape,
        chosen,
        standing_grants=standing_grants,
        lasting_grants=lasting_grants,
        whole_layers=whole_layers,
        prefetch=prefetch,
    )
    requests = Requests(schedule or Schedule(n_layers, 64))
    made = Engine(
        Core(residency, requests),
        random.Random(seed),
        credit,
        notice_probability=notice_probability,
    )
    made.start_readers(n_readers)
    return made


def need(
    layer: int, experts: list[int], released: tuple[SlotLease, ...] = (), n_recent: int = 0
) -> Need:
    """A need for some experts, one token each."""
    uses = tuple(ExpertUse(expert, 1, n_recent) for expert in sorted(experts))
    return Need(1, layer, uses, (), released)


def done(
    step: int, released: tuple[SlotLease, ...] = (), sampled: tuple[Any, ...] = ()
) -> StepDone:
    """A step that ended as it should."""
    return StepDone(step, sampled, NO_TIMES, 0, released, False)
