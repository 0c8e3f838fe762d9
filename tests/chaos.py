"""The decision core among processes that die, answer late, fail and are cancelled at random.

Every process is a few lines; a seed decides what happens next. After every event the core's
invariants are checked, and that no slot which compute holds has changed under it.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from simulation import NO_TIMES, SLAB_BYTES, geometry, policy_geometry

from coordinator.core.actions import (
    Action,
    Deliver,
    Ended,
    PunchSlots,
    RestoreSlots,
    StopWith,
    ToCompute,
    ToWorker,
    VacateSlots,
)
from coordinator.core.policy_choice import POLICIES, make_policy
from coordinator.core.prefetch import MAX_GUESSES, Phase, Prefetch
from coordinator.core.requests import Requests
from coordinator.core.residency import Residency
from coordinator.core.schedule import Schedule
from coordinator.core.slots import Key, SlotState
from coordinator.core.state import (
    ComputeDied,
    ComputeReady,
    Continue,
    Core,
    EndRequest,
    Event,
    FromCompute,
    FromReader,
    NewRequest,
    PoolTarget,
    ReaderCondemned,
    ReaderDied,
    ReaderReady,
)
from shm.messages import (
    Abort,
    Adopt,
    Adopted,
    Cancel,
    Dropped,
    Evicted,
    ExpertUse,
    Finished,
    Grant,
    Guess,
    KnownLayer,
    Need,
    ReadFailed,
    ReadSlabs,
    ReadSpan,
    Release,
    Revoke,
    Sampled,
    Sampling,
    SlabNotice,
    SlabRead,
    SlabsReady,
    SlotLease,
    SlotsLost,
    SlotsPunched,
    Step,
    StepDone,
    Submit,
)

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 1)
CREDIT = 2


@dataclass
class Compute:
    """What the compute worker knows; a death forgets it all."""

    inbox: deque[Any] = field(default_factory=deque)
    sequences: set[int] = field(default_factory=set)
    step: Step | None = None
    layer: int = 0
    wanted: set[int] = field(default_factory=set)
    held: list[SlotLease] = field(default_factory=list)
    standing: dict[int, dict[int, SlotLease]] = field(default_factory=dict)  # those in the pool
    cancelled: set[int] = field(default_factory=set)
    on_the_way: dict[SlotLease, int] = field(default_factory=dict)  # expert of the layer, by lease
    n_waiting: int = 0
    told: set[SlotLease] = field(default_factory=set)
    # held since a reader told of them, or before it asked
    early: dict[SlotLease, Key] = field(default_factory=dict)
    lasting: dict[Key, SlotLease] = field(default_factory=dict)
    keeps: bool = False  # what is granted of this layer lasts
    computing: dict[Key, SlotLease] = field(default_factory=dict)  # a layer that is known
    earlier: list[KnownLayer] = field(default_factory=list)
    outbox: deque[Any] = field(default_factory=deque)  # said, not heard yet

    def in_use(self) -> list[SlotLease]:
        """What it may look at without another message. While it waits, for a step or for experts,
        it reads what was sent to it before it goes on."""
        revoked = {layer for m in self.inbox if isinstance(m, Revoke) for layer in m.layers}
        standing = [own.values() for layer, own in self.standing.items() if layer not in revoked]
        return [*self.held, *(lease for leases in standing for lease in leases)]

    def lasts(self) -> dict[Key, SlotLease]:
        """What it may compute with in this step without asking."""
        told = [m.keys for m in self.inbox if isinstance(m, Evicted)]
        told += [m.evicted for m in self.inbox if isinstance(m, Grant)]
        evicted = {key for keys in told for key in keys}
        kept = {key: lease for key, lease in self.lasting.items() if key not in evicted}
        return kept | self.computing


@dataclass
class Reader:
    """What a reader was told. `is_condemned`: it is being killed and may still answer."""

    reads: list[SlabRead] = field(default_factory=list)
    late: list[SlabsReady] = field(default_factory=list)  # compute was told, the core was not
    is_condemned: bool = False


def _acting(mode: str) -> Prefetch:
    """One that reads guesses from the first step on, where it reads any."""
    prefetch = Prefetch(mode)
    if prefetch.phase is not Phase.OFF:
        prefetch.phase = Phase.ON
    return prefetch


class World:
    """The core and everything around it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.n_layers, self.n_experts = rng.randint(1, 6), rng.randint(2, 8)
        n_all = self.n_layers * self.n_experts
        n_slots = rng.choice([rng.randint(2, n_all + 2), n_all])
        name = rng.choice(sorted(POLICIES))
        usage = {(rng.randrange(self.n_layers), rng.randrange(self.n_experts)): 2.0}
        residency = Residency(
            geometry(self.n_layers, self.n_experts, n_slots),
            make_policy(name, policy_geometry(self.n_layers, n_slots), usage, 1),
            standing_grants=rng.random() < 0.7,
            lasting_grants=rng.random() < 0.8,
            whole_layers=rng.random() < 0.2,
            prefetch=_acting(rng.choice(["off", "prompt", "previous-token", *3 * ["router"]])),
        )
        schedule = Schedule(self.n_layers, 64, rng.randint(1, 4))
        self.core = Core(residency, Requests(schedule))
        self.n_slots = n_slots
        self.adopts = rng.random() < 0.6
        self.compute: Compute | None = Compute()
        self.unread: list[SlabNotice] = []  # in the pipe while there is no compute worker
        self.readers: dict[str, Reader | None] = dict.fromkeys(
            f"io{number}" for number in range(rng.randint(1, 3))
        )
        self.n_requests = 0
        self.ends: Counter[int] = Counter()
        self.happened: Counter[str] = Counter()
        self.faults = True
        residency.compute_ready(adopts=self.adopts)
        if rng.random() < 0.6:  # otherwise experts come as they are needed
            self.perform(residency.preload(residency.geometry.all_keys()))

    def handle(self, event: Event) -> None:
        """One event through the core, its actions performed, everything checked."""
        self.perform(self.core.handle(event))
        self.core.check()
        self.check_held()

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToCompute(message):
                    if self.compute is not None:
                        self.compute.inbox.append(message)
                case ToWorker(name, ReadSlabs(reads)):
                    reader = self.readers[name]
                    if reader is not None:
                        reader.reads += reads
                case ToWorker(_, SlotsPunched(slots)):
                    self.check_punched(slots)
                case ToWorker(_, message):
                    raise AssertionError(f"unexpected {message}")
                case PunchSlots(slots) | VacateSlots(slots):
                    self.check_punched(slots)
                case RestoreSlots():
                    pass
                case Deliver(sampled):
                    for drawn in sampled:
                        if self.rng.random() < 0.05:  # a stop text
                            self.handle(EndRequest(drawn.request, "stop"))
                case Ended(request):
                    self.ends[request] += 1
                case StopWith():
                    raise AssertionError(action.text)

    def check_held(self) -> None:
        """What compute was granted and has not given back lies where it was said."""
        if self.compute is None:
            return
        slots = self.core.residency.slots
        for lease in self._counting(self.compute):
            if lease in self.compute.early:  # in any state, but nothing else is read into it
                key, found = self.compute.early[lease], slots.slots[lease.slot].key
                assert found == key, (key, found)
                continue
            slot = slots.current(lease)
            assert slot is not None, f"{lease} was evicted in use"
            assert slot.state in (SlotState.READY, SlotState.ADOPTED)
        for key, lease in self.compute.lasts().items():
            found = slots.slots[lease.slot].key  # None: it could not be read again, and lies there
            assert found == key or (self._is_aborted and key in self.compute.computing), key

    def _counting(self, compute: Compute) -> list[SlotLease]:
        """What compute uses, but for what a reader told it of that then could not be read again:
        its step is being aborted, and what it computes counts nothing."""
        return [
            each for each in compute.in_use() if not (self._is_aborted and each in compute.early)
        ]

    @property
    def _is_aborted(self) -> bool:
        """Whether compute is about to hear that its step ends."""
        inbox = self.compute.inbox if self.compute is not None else ()
        return any(isinstance(message, Abort) for message in inbox)

    def check_punched(self, slots: tuple[int, ...]) -> None:
        """Nobody uses what is in them."""
        if self.compute is not None:
            assert not {lease.slot for lease in self._counting(self.compute)}.intersection(slots)
            lasting = {lease.slot for lease in self.compute.lasts().values()}
            assert self._is_aborted or not lasting.intersection(slots)
        for reader in filter(None, self.readers.values()):
            assert not {read.lease.slot for read in reader.reads}.intersection(slots)

    # What may happen next

    def turn(self) -> None:
        """One thing happens."""
        things = [
            (self.compute_reads_a_message, 12),
            (self.compute_goes_on, 8),
            (self.compute_is_heard, 20),
            (self.a_reader_answers, 8),
            (self.a_reader_tells_compute, 6),
            (self.the_loop_goes_on, 6),
            (self.a_process_starts, 4),
        ]
        if self.faults:
            things += [
                (self.a_request_comes, 1),
                (self.a_request_is_cancelled, 0.3),
                (self.a_read_fails, 0.6),
                (self.a_reader_is_condemned, 0.3),
                (self.a_reader_dies, 0.4),
                (self.compute_dies, 0.08),
                (self.the_room_changes, 0.8),
            ]
        else:
            things.append((self.a_condemned_reader_dies, 4))
        chosen = self.rng.choices([thing for thing, _ in things], [w for _, w in things])[0]
        self.happened[chosen.__name__] += bool(chosen())

    def the_loop_goes_on(self) -> bool:
        if self.compute is not None:
            self.handle(Continue())
        return True

    def a_request_comes(self) -> bool:
        self.n_requests += 1
        n_prompt = self.rng.choice([1, 3, 64, 65, 200])
        submit = Submit(self.n_requests, tuple(range(n_prompt)), GREEDY, 1000, False)
        self.handle(NewRequest(submit, self.rng.choice([0, 1, 5]), frozenset({9})))
        return True

    def a_request_is_cancelled(self) -> bool:
        request = self.rng.randint(1, self.n_requests + 1)
        self.handle(EndRequest(request, "cancelled"))
        return True

    def some_reader(self, *, condemned: bool | None = False) -> tuple[str, Reader] | None:
        found = [
            (name, reader)
            for name, reader in self.readers.items()
            if reader is not None and condemned in (None, reader.is_condemned)
        ]
        return self.rng.choice(found) if found else None

    def a_reader_answers(self) -> bool:
        found = self.some_reader(condemned=None)
        if found is not None and found[1].late:
            self.handle(FromReader(found[0], found[1].late.pop(0)))
            return True
        if found is None or not found[1].reads:
            return False
        name, reader = found
        read = reader.reads[self.rng.randrange(len(reader.reads))]
        if not reader.is_condemned or self.rng.random() < 0.5:
            reader.reads.remove(read)
        self.handle(FromReader(name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0)))
        if self.rng.random() < 0.05:  # twice
            self.handle(FromReader(name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0)))
        return True

    def a_reader_tells_compute(self) -> bool:
        found = self.some_reader(condemned=None)
        if found is None or not found[1].reads:
            return False
        reader = found[1]
        lease = reader.reads.pop(self.rng.randrange(len(reader.reads))).lease
        reader.late.append(SlabsReady(lease, 1, 2, SLAB_BYTES, 0, noticed=True))
        notice = SlabNotice(lease, ReadSpan(1, 2))
        (self.compute.inbox if self.compute is not None else self.unread).append(notice)
        return True

    def a_read_fails(self) -> bool:
        found = self.some_reader(condemned=None)
        if found is None or not found[1].reads:
            return False
        name, reader = found
        read = reader.reads.pop(self.rng.randrange(len(reader.reads)))
        self.handle(FromReader(name, ReadFailed(read.lease, 5, "EIO", False)))
        return True

    def a_reader_is_condemned(self) -> bool:
        found = self.some_reader()
        if found is None:
            return False
        found[1].is_condemned = True
        self.handle(ReaderCondemned(found[0]))
        return True

    def a_reader_dies(self) -> bool:
        return self._dies(self.some_reader(condemned=None))

    def a_condemned_reader_dies(self) -> bool:
        return self._dies(self.some_reader(condemned=True))

    def _dies(self, found: tuple[str, Reader] | None) -> bool:
        if found is None:
            return False
        name, reader = found
        self.readers[name] = None
        self.handle(ReaderDied(name))
        for read in reader.reads:  # no answer of the dead counts
            if self.rng.random() < 0.2:
                self.handle(FromReader(name, SlabsReady(read.lease, 1, 2, SLAB_BYTES, 0)))
        return True

    def a_process_starts(self) -> bool:
        dead = [name for name, reader in self.readers.items() if reader is None]
        if dead:
            name = self.rng.choice(dead)
            self.readers[name] = Reader()
            self.handle(ReaderReady(name, CREDIT))
        elif self.compute is None:
            self.compute = Compute()
            self.compute.inbox.extend(self.unread)
            self.unread.clear()
            self.handle(ComputeReady(self.adopts))
        else:
            return False
        return True

    def the_room_changes(self) -> bool:
        n_slots = self.rng.choice([2, self.n_slots // 2, self.n_slots - 1, *3 * [self.n_slots]])
        self.handle(PoolTarget((max(2, n_slots),)))
        return True

    def compute_dies(self) -> bool:
        if self.compute is None:
            return False
        while self.compute.outbox and self.rng.random() < 0.9:
            self.compute_is_heard()
        self.compute = None
        self.handle(ComputeDied("killed"))
        return True

    # The compute worker

    def compute_reads_a_message(self) -> bool:
        compute = self.compute
        if compute is None or not compute.inbox or compute.computing:
            return False
        match compute.inbox.popleft():
            case Submit(request):
                assert request not in compute.sequences
                compute.sequences.add(request)
            case Finished(request):
                compute.sequences.remove(request)
                compute.cancelled.discard(request)
            case Step() as step:
                assert compute.step is None, "two steps at once"
                assert {part.request for part in step.slices} <= compute.sequences
                compute.step, compute.layer = step, step.first_layer
                self._enter_layer(compute)
            case Grant() as grant:
                self._evicted(compute, grant.evicted)
                self._granted(compute, grant)
            case SlabNotice(lease):
                compute.told.add(lease)
                if compute.step is not None and compute.wanted:
                    self._landed(compute, [lease])
            case Abort(number):
                if compute.step is not None and compute.step.step == number:
                    self._end_step(compute, cancelled=True)
            case Cancel(request):
                compute.cancelled.add(request)
            case Evicted(keys):
                self._evicted(compute, keys)
            case Revoke(layers):
                for layer in layers:
                    compute.standing.pop(layer, None)
                self.happened["revoked"] += 1
                self._say(Dropped(layers))
            case Adopt(layer, locations):
                assert compute.step is None, "an expert moves while a step may use it"
                for location in locations:
                    slot = self.core.residency.slots.current(location.lease)
                    assert slot is not None and slot.key == (layer, location.expert)
                has_copies = layer in compute.standing and self.rng.random() < 0.95
                if has_copies:
                    for location in locations:
                        del compute.standing[layer][location.expert]
                self.happened["adopted"] += 1
                self._say(Adopted(layer, has_copies))
            case other:
                raise AssertionError(f"compute got {other}")
        return True

    def compute_goes_on(self) -> bool:
        """A layer that needed no grant is done."""
        compute = self.compute
        if compute is None or not compute.computing:
            return False
        compute.computing = {}
        compute.layer += 1
        self._enter_layer(compute)
        return True

    def compute_is_heard(self) -> bool:
        """What it said arrives, in order."""
        if self.compute is None or not self.compute.outbox:
            return False
        self.handle(FromCompute(self.compute.outbox.popleft()))
        return True

    def _say(self, message: Any) -> None:
        """Some of what it says is on its way for a while, and other things happen meanwhile."""
        assert self.compute is not None
        self.compute.outbox.append(message)
        while self.compute is not None and self.compute.outbox and self.rng.random() < 0.8:
            self.compute_is_heard()

    def _enter_layer(self, compute: Compute) -> None:
        """The next layer that needs a message, or the end of the step."""
        step = compute.step
        assert step is not None
        while True:
            if any(part.request in compute.cancelled for part in step.slices):
                self._end_step(compute, cancelled=True)
                return
            if compute.layer == step.stop_layer:
                self._end_step(compute, cancelled=False)
                return
            if compute.layer not in compute.standing:
                break
            self._tell_guess(compute, self._guessed())
            compute.layer += 1
        experts = self.rng.sample(range(self.n_experts), self.rng.randint(1, self.n_experts))
        is_prompt = step.slices[0].n_tokens > 1
        uses = tuple(ExpertUse(e, 1, int(is_prompt and e % 2)) for e in sorted(experts))
        known = self._known(compute, experts)
        if len(known) == len(experts):
            compute.computing = known
            guess = self._guessed()
            compute.earlier.append(KnownLayer(compute.layer, uses, guess))
            self._tell_guess(compute, guess)
            self.check_held()
            return
        compute.keeps, compute.n_waiting, compute.on_the_way = False, 0, {}
        compute.wanted = {e for e in experts if (compute.layer, e) not in known}
        released = self._take_held(compute)
        compute.held = list(known.values())
        compute.early = {lease: key for key, lease in known.items()}
        earlier, compute.earlier = tuple(compute.earlier), []
        ids = tuple(expert for _, expert in known)
        need = Need(step.step, compute.layer, uses, self._guessed(), released, ids, earlier)
        self._say(need)

    def _guessed(self) -> tuple[int, ...]:
        """Experts of the next layer, likeliest first; now and then there is no guess."""
        n_guesses = self.rng.choice([0, 1, min(MAX_GUESSES, self.n_experts)])
        return tuple(self.rng.sample(range(self.n_experts), n_guesses))

    def _tell_guess(self, compute: Compute, guess: tuple[int, ...]) -> None:
        """At a layer that sends no `Need`."""
        layer = compute.layer + 1
        unknown = tuple(expert for expert in guess if (layer, expert) not in compute.lasting)
        if unknown and layer < self.n_layers and layer not in compute.standing:
            self._say(Guess(layer, unknown))

    def _known(self, compute: Compute, experts: list[int]) -> dict[Key, SlotLease]:
        """What needs no grant; now and then something wrote over it."""
        keys = [(compute.layer, expert) for expert in experts]
        for key in keys:
            if self.faults and self.rng.random() < 0.01:
                compute.lasting.pop(key, None)
        known = {key: compute.lasting[key] for key in keys if key in compute.lasting}
        self.happened["known"] += len(known)
        return known

    def _evicted(self, compute: Compute, keys: Iterable[Key]) -> None:
        for key in keys:
            self.happened["evicted"] += 1
            compute.lasting.pop(key, None)

    def _granted(self, compute: Compute, grant: Grant) -> None:
        step = compute.step
        is_awaited = step is not None and grant.layer == compute.layer and compute.wanted
        if not grant.standing and (not is_awaited or step is None or grant.step != step.step):
            return  # of a layer that is over, or of a step that ended early
        lost = [each for each in grant.locations if self.faults and self.rng.random() < 0.04]
        if lost:
            self.happened["lost"] += len(lost)
            leases_lost = tuple(each.lease for each in lost)
            self._say(SlotsLost(grant.layer, leases_lost))
        leases = {each.expert: each.lease for each in grant.locations if each not in lost}
        if grant.standing:
            compute.lasting = {k: v for k, v in compute.lasting.items() if k[0] != grant.layer}
        if grant.standing and not lost:
            assert set(leases) == set(range(self.n_experts))
            compute.standing[grant.layer] = leases
        if not is_awaited:
            return  # between two steps
        leases = {expert: leases[expert] for expert in compute.wanted & set(leases)}
        compute.keeps |= grant.lasting
        if not grant.standing:
            compute.held += leases.values()
            self._keep(compute, leases)
        compute.wanted -= set(leases)
        self.check_held()
        compute.n_waiting = grant.n_waiting
        for lease in leases.values():
            compute.on_the_way.pop(lease, None)
        compute.on_the_way |= {each.lease: each.expert for each in grant.on_the_way}
        self._landed(compute, [each.lease for each in grant.on_the_way])

    def _keep(self, compute: Compute, leases: dict[int, SlotLease]) -> None:
        if compute.keeps:
            compute.lasting |= {(compute.layer, e): lease for e, lease in leases.items()}

    def _landed(self, compute: Compute, leases: list[SlotLease]) -> None:
        """What was on its way and is there is computed; then the next layer."""
        for lease in compute.told.intersection(leases):
            expert = compute.on_the_way.pop(lease, None)
            if expert in compute.wanted:
                compute.wanted.remove(expert)
                compute.held.append(lease)
                compute.early[lease] = (compute.layer, expert)
                self._keep(compute, {expert: lease})
                self.happened["used early"] += 1
        if compute.n_waiting and compute.held:
            self._say(Release(self._take_held(compute)))
        if not compute.wanted:
            compute.layer += 1
            self._enter_layer(compute)

    def _take_held(self, compute: Compute) -> tuple[SlotLease, ...]:
        released, compute.held, compute.early = tuple(compute.held), [], {}
        return released

    def _end_step(self, compute: Compute, *, cancelled: bool) -> None:
        step, compute.step = compute.step, None
        assert step is not None
        compute.wanted, compute.computing = set(), {}
        earlier, compute.earlier = tuple(compute.earlier), []
        held = self._take_held(compute)
        released = () if cancelled else held
        sampled = tuple(
            Sampled(part.request, self.rng.randrange(12), -1.0)
            for part in step.slices
            if part.sample and not cancelled
        )
        done = StepDone(step.step, sampled, NO_TIMES, 0, released, cancelled, earlier)
        self._say(done)

    def settle(self) -> None:
        """No more faults: everything comes to its end."""
        self.faults = False
        for _ in range(50_000):
            residency = self.core.residency
            if self.core.requests.is_idle and not (residency.n_loading or residency.n_to_settle):
                return
            self.turn()
        raise AssertionError("something waits for what never comes")
