"""Feeds the forward pass with experts: asks for a layer's, computes them as they are granted.

What has a lasting grant is computed at once, in one kernel call. A layer of which that is not all
sends a `Need` before; what else is resident is granted at once and computed while the rest is read;
each miss is computed as it lands, which its reader tells by a `SlabNotice`. Where few tokens go
through layers whose experts are all known, these do not come here one by one: `used` tells of them.
Outputs are kept per (token, expert) and summed in ascending expert id, so the order of arrival
never shows in a result.

This module does not know where slabs come from or who decides. Rule to keep: an expert's bytes are
touched only between its grant and its release.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from compute_worker.endings import Endings
from compute_worker.fed_layer import FedLayer, Waiting
from compute_worker.kernels import Kernels, LayerRun
from compute_worker.known_experts import KnownExperts
from compute_worker.lasting import LastingGrants
from compute_worker.link import Link
from compute_worker.matrix import (
    Addresses,
    Floats,
    Integers,
    aligned_floats,
    expert_shape,
    group_by_expert,
)
from compute_worker.own_memory import OwnMemory
from compute_worker.regions import Regions
from compute_worker.standing import StandingLayers
from compute_worker.told_uses import ToldUses
from io_worker.slabs import SlabTable
from shm.messages import (
    Abort,
    Adopt,
    Cancel,
    Evicted,
    ExpertUse,
    Finished,
    Forget,
    Grant,
    Guess,
    KnownLayer,
    Location,
    Need,
    Release,
    Revoke,
    SlabNotice,
    SlotLease,
    SlotsLost,
)

Now = Callable[[], int]


class StepCancelled(Exception):
    """The running step must not go on: its sequence was cancelled or an expert cannot be had."""


class ExpertFeed:
    """The `experts` callable of the forward pass, over a link and the regions of memory."""

    def __init__(
        self,
        link: Link,
        regions: Regions,
        slabs: SlabTable,
        n_active: int,
        kernels: Kernels,
        own: OwnMemory,
        now: Now = time.monotonic_ns,
    ) -> None:
        self.waiting = Waiting()
        self.standing_uses = 0
        self.computing_ns = 0  # in the kernels of experts, of this step
        self.n_guesses = 0  # see `forward.Known`
        self.endings = Endings()
        self.released: list[SlotLease] = []  # computed, not told yet
        self._link = link
        self._regions = regions
        self._kernels = kernels
        self._now = now
        self._n_active = n_active
        self._shapes = {layer.layer: expert_shape(layer) for layer in slabs.layers}
        self._known = KnownExperts(len(slabs.layers), slabs.n_experts)
        self._standing = StandingLayers(self._known, own)
        self._lasting = LastingGrants(self._known, regions)
        self._uses = ToldUses(len(slabs.layers), n_active)
        self._step: int | None = None  # None: no step runs
        self._out: Floats | None = None  # of this step: clearing pages for each layer takes time
        self._noticed: dict[int, SlabNotice] = {}  # the last one of each slot

    def begin_step(
        self,
        step: int,
        recent: npt.NDArray[np.bool_] | None,
        wanted: Integers | None = None,
        n_guesses: int = 0,
    ) -> None:
        """A step begins; `recent` and `wanted`: see `ToldUses.begin_step`, `n_guesses`: `Step`."""
        self._step = step
        self.n_guesses = n_guesses
        self._uses.begin_step(recent, wanted)
        self.waiting = Waiting()
        self.standing_uses = 0
        self.computing_ns = 0

    def end_step(self, *, early: bool) -> None:
        """The step is over: an `Abort` that comes now is late. After an early end the coordinator
        releases everything by itself."""
        self._step = None
        self._out = None
        if early:
            self.released = []

    def take_released(self) -> tuple[SlotLease, ...]:
        """Leases that the next message gives back."""
        released, self.released = tuple(self.released), []
        return released

    def take_earlier(self) -> tuple[KnownLayer, ...]:
        """Layers that the next message tells of."""
        return self._uses.take_earlier()

    def note(self, message: object) -> None:
        """Take a message that no `Need` waits for: it may end the step at the next layer boundary.

        No kernel runs meanwhile, so whatever stands may change its place or go.
        """
        match message:
            case Cancel() | Finished() | Forget():
                self.endings.note(message)
            case Grant(layer):
                self._lasting.forget(message.evicted)
                if message.standing:
                    self._stand(layer, message, self._intact(layer, message.locations))
            case Evicted(keys):
                self._lasting.forget(keys)
            case Adopt():
                self._link.send(self._standing.adopt(message))
            case Revoke(layers):
                self._link.send(self._standing.revoke(layers))
            case SlabNotice(lease):
                self._noticed[lease.slot] = message
            case Abort(step):
                if step == self._step:
                    raise StepCancelled

    def __call__(self, layer: int, x: Floats, chosen: Integers, weights: Floats) -> Floats:
        """Experts of one layer: x (T, D), chosen (T, A) ascending ids, weights (T, A) -> (T, D),
        valid until the next call."""
        if self._out is None or len(self._out) < chosen.size:
            self._out = aligned_floats(chosen.size, x.shape[1])
        out = self._out[: chosen.size]  # (T*A, D)
        pairs = group_by_expert(chosen)
        if layer in self._standing:
            self.standing_uses += len(pairs)
            self._tell_guess(layer + 1, self._uses.take_guess())
            there = self._known.addresses(layer, list(pairs))
            self._compute(layer, there, list(pairs.values()), x, out)
        else:
            self._compute_granted(layer, pairs, x, out)
        return self._kernels.combine(out, weights)  # (T, D)

    @property
    def entries(self) -> Addresses:
        """See `forward.Known`."""
        return self._known.entries

    def used(self, run: LayerRun) -> None:
        """See `forward.Known`."""
        self.computing_ns += run.experts_ns
        n_done = len(run.layers)
        of_done = zip(run.layers, run.chosen, run.guesses[:n_done], strict=True)
        for layer, chosen, guessed in of_done:
            if layer in self._standing:
                self.standing_uses += len(set(chosen.ravel().tolist()))
            else:
                self._uses.add_known(layer, group_by_expert(chosen), guessed)
        if run.unknown is not None:
            self._uses.add_guess(run.guesses[n_done])

    def _compute_granted(
        self, layer: int, pairs: dict[int, Integers], x: Floats, out: Floats
    ) -> None:
        known = self._lasting.known(layer, pairs)
        if len(known) == len(pairs):
            guessed = self._uses.take_guess()
            self._uses.add_known(layer, pairs, guessed)
            self._tell_guess(layer + 1, guessed)
            self._compute(layer, self._regions.table(known), list(pairs.values()), x, out)
            return
        fed = FedLayer(layer, self._now())
        self._ask(layer, self._uses.of(layer, pairs), known)
        if known:
            wanted = [pairs.pop(location.expert) for location in known]
            self._compute(layer, self._regions.table(known), wanted, x, out)
            self.released += [location.lease for location in known]
            fed.since_ns = self._now()
        while pairs:
            there = {location.expert: location for location in self._next_there(fed)}  # once each
            mine = [location for expert, location in there.items() if expert in pairs]
            if mine:
                wanted = [pairs.pop(location.expert) for location in mine]
                self._compute(layer, self._regions.table(mine), wanted, x, out)
                if fed.lasts and not fed.stands:
                    self._lasting.keep(layer, mine)
            if not fed.stands:
                self.released += [location.lease for location in mine]
            self._give_back(fed)
            fed.since_ns = self._now()
        fed.account(self.waiting)

    def _give_back(self, fed: FedLayer) -> None:
        """Where somebody waits for slots, do not delay."""
        if fed.n_waiting and self.released:
            self._link.send(Release(self.take_released()))

    def _ask(self, layer: int, uses: tuple[ExpertUse, ...], known: list[Location]) -> None:
        assert self._step is not None
        of = tuple([location.expert for location in known])
        told = (self._uses.take_guess(), self.take_released(), of, self.take_earlier())
        self._link.send(Need(self._step, layer, uses, *told))

    def _tell_guess(self, layer: int, guessed: tuple[int, ...]) -> None:
        """No `Need` carries it: it is worth a message if something of it is not here."""
        unknown = tuple([expert for expert in guessed if not self._known.has(layer, expert)])
        if unknown:
            self._link.send(Guess(layer, unknown))

    def _next_there(self, fed: FedLayer) -> list[Location]:
        """Wait for experts of the layer; all those that are there now, for one call of a kernel."""
        there = self._taken(fed, self._link.receive())
        while not there:
            there = self._taken(fed, self._link.receive())
        # a standing grant names all, and what comes after it may end it
        while not fed.stands and (message := self._link.poll()) is not None:
            there += self._taken(fed, message)
        return there

    def _taken(self, fed: FedLayer, message: object) -> list[Location]:
        """What may be computed because of a message."""
        match message:
            case Grant(layer=fed.layer) if message.standing or message.step == self._step:
                return self._granted(fed, message)
            case SlabNotice(lease):
                self._noticed[lease.slot] = message
                landed = fed.landed([lease.slot], self._noticed)
                if landed:
                    fed.end_wait(self._now())
                    fed.stands = False
                return self._intact(fed.layer, landed)
            case _:  # also a grant of a layer that is over: a dying reader told of it before
                self.note(message)
        return []

    def _granted(self, fed: FedLayer, grant: Grant) -> list[Location]:
        fed.end_wait(self._now())
        self._lasting.forget(grant.evicted)
        fed.granted(grant)
        self._give_back(fed)  # what was known is computed, and nothing else may come before that
        intact = self._intact(fed.layer, grant.locations)
        self._stand(fed.layer, grant, intact)
        slots = [location.lease.slot for location in grant.on_the_way]
        return intact + self._intact(fed.layer, fed.landed(slots, self._noticed))

    def _intact(self, layer: int, granted: Sequence[Location]) -> list[Location]:
        """What was granted and is there; the rest is told, and comes again."""
        intact = [each for each in granted if self._regions.is_intact(layer, each)]
        if len(intact) < len(granted):
            lost = tuple([each.lease for each in granted if each not in intact])
            self._link.send(SlotsLost(layer, lost))
        return intact

    def _stand(self, layer: int, grant: Grant, intact: list[Location]) -> None:
        """Keep a standing grant, if all of it is there."""
        if grant.standing:
            self._lasting.forget_layer(layer)
        if grant.standing and len(intact) == len(grant.locations):
            self._standing.add(layer, self._regions.table(intact))

    def _compute(
        self, layer: int, addresses: Addresses, pairs: list[Integers], x: Floats, out: Floats
    ) -> None:
        blocks, started_ns = self._kernels.expert_blocks, time.monotonic_ns()
        blocks(self._shapes[layer], addresses, pairs, self._n_active, x, out)
        self.computing_ns += time.monotonic_ns() - started_ns
