"""The decision core: an event goes in, actions come out. It does no I/O of any kind.

It reads no clock, draws no random number, opens nothing and logs nothing; the loop around it
receives, decodes, calls `handle`, and performs what comes back. The same core runs inside the
compute process with ``--single-process``, and under `replay`.

`residency` routes experts, `requests` composes steps; this module joins the two.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from coordinator.core.actions import Action, RequestsFailed, ToCompute
from coordinator.core.page_cache_residency import PageCacheResidency
from coordinator.core.request import Restore
from coordinator.core.requests import Requests
from coordinator.core.residency import Residency
from shm.messages import (
    Abort,
    Adopted,
    Dropped,
    Evicted,
    Guess,
    KnownLayer,
    Need,
    ReadFailed,
    Release,
    SlabsReady,
    SlotsLost,
    StepDone,
    Submit,
)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request arrives. Its answer ends at `max_tokens` or at one of `stop_ids`."""

    submit: Submit
    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A request ends from outside: "stop" (a stop string) or "cancelled" (nobody listens)."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Deliveries are dealt with: compose the next step."""


@dataclass(frozen=True, slots=True)
class ReaderReady:
    """A reader takes reads, up to `credit` slabs at once."""

    name: str
    credit: int


@dataclass(frozen=True, slots=True)
class ReaderCondemned:
    """A reader makes no progress and is being killed."""

    name: str


@dataclass(frozen=True, slots=True)
class ReaderDied:
    """A reader is dead and reaped."""

    name: str


@dataclass(frozen=True, slots=True)
class ComputeReady:
    """The compute worker is up; whether it will adopt experts that stay for good."""

    adopts: bool


@dataclass(frozen=True, slots=True)
class ComputeDied:
    """The compute worker is dead and reaped."""

    text: str


class FromCompute(NamedTuple):
    """A message of the compute worker."""

    message: Any


class FromReader(NamedTuple):
    """A message of a reader, by its process name."""

    name: str
    message: Any


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """So many slots of each class may be in use from now on."""

    slots_of_class: tuple[int, ...]


MAX_ACTIVE = 256  # experts that a token uses of a layer: more than any model has
OF_COMPUTE = (Guess, Need, SlotsLost, Release, Adopted, Dropped, StepDone)  # messages for the core
Event = (
    NewRequest | EndRequest | Continue | ReaderReady | ReaderCondemned | ReaderDied
    | ComputeReady | ComputeDied | FromCompute | FromReader | PoolTarget | Restore
)  # fmt: skip


class Core:
    """Slots and requests behind one door. `on_need` hears of every `Need` (a trace)."""

    def __init__(
        self,
        residency: Residency | PageCacheResidency,
        requests: Requests,
        on_need: Callable[[Need], None] | None = None,
    ) -> None:
        self.residency = residency
        self.requests = requests
        self._on_need = on_need

    def handle(self, event: Event) -> list[Action]:
        """Decide. Raises AssertionError or SlotError for a fault of ours."""
        return list(self.decide(event))

    def decide(self, event: Event) -> Iterable[Action]:
        """The same for whoever performs actions as they come: the reads for a `Need` can begin
        while its grant is still being decided. All must be taken before the next message is
        handled; that a reader is condemned may be told in between."""
        match event:
            case FromCompute(message):
                return self._from_compute(message)
            case FromReader(name, SlabsReady() as ready):
                return self.residency.handle_ready(name, ready)
            case FromReader(name, ReadFailed() as failed):
                return self._after_read_failed(self.residency.handle_failed(name, failed))
            case Continue():
                is_stepping = self.requests.running_step is not None
                settled = [] if is_stepping else self.residency.settle()
                return settled + self.requests.compose(self._n_guesses())
            case Restore():
                return self.requests.restore(event)
            case NewRequest(submit, max_tokens, stop_ids):
                return self.requests.submit(submit, max_tokens, stop_ids)
            case EndRequest(request, reason):
                return self.requests.end(request, reason)
            case ReaderReady(name, credit):
                return self.residency.worker_ready(name, credit)
            case ReaderCondemned(name):
                return self.residency.worker_condemned(name)
            case ReaderDied(name):
                return self.residency.worker_died(name)
            case PoolTarget(slots_of_class):
                is_stepping = self.requests.running_step is not None
                return self.residency.resize(slots_of_class, is_stepping=is_stepping)
            case ComputeReady(adopts):
                self.residency.compute_ready(adopts=adopts)
                return []
            case ComputeDied(text):
                return self.residency.compute_died() + self.requests.compute_died(text)
        raise AssertionError(f"no rule for {event!r}")

    def check(self) -> None:
        """Invariants of both halves; raises AssertionError."""
        self.residency.check()
        self.requests.check()

    def _from_compute(self, message: Any) -> Iterable[Action]:
        match message:
            case Guess():
                return self.residency.handle_guess(message)
            case Need():
                self._tell_of(message.step, message.earlier)
                if self._on_need is not None:
                    self._on_need(message)
                return self._after_failures(self.residency.serve(message))
            case SlotsLost():
                return self._after_failures(self.residency.handle_lost(message))
            case Release(released):
                return self.residency.handle_release(released)
            case Adopted() | Dropped():
                is_stepping = self.requests.running_step is not None
                return self.residency.handle_moved(message, is_stepping=is_stepping)
            case StepDone():
                self._tell_of(message.step, message.earlier)
                for known in message.earlier:
                    self.residency.note_known(known)
                self._judge_prefetch(message)
                if message.failure is not None:
                    self.requests.fail_step(message.failure)
                if message.cancelled:
                    actions = self.residency.abort_layer()
                else:
                    actions = self.residency.end_layer(message.released)
                return actions + self.requests.handle_done(message)
        raise AssertionError(f"no rule for {type(message).__name__} from compute")

    def _tell_of(self, step: int, earlier: tuple[KnownLayer, ...]) -> None:
        """Layers that compute was done with without asking, to whoever hears of every `Need`."""
        if self._on_need is not None:
            for known in earlier:
                self._on_need(Need(step, known.layer, known.experts, known.predicted, ()))

    def _n_guesses(self) -> int:
        """Compute guesses only for those who listen: each guess costs it a small matrix."""
        heard = MAX_ACTIVE if self._on_need is not None else 0
        return max(heard, self.residency.prefetch.n_wanted)

    def _judge_prefetch(self, done: StepDone) -> None:
        """Only steps that decode alone compare with each other."""
        step = self.requests.running_step
        if step and not done.cancelled and all(part.n_tokens == 1 for part in step.slices):
            times = done.times
            self.residency.prefetch.handle_step(times.wall_ns, times.wait_disk_ns)

    def _after_read_failed(self, actions: list[Action]) -> Iterable[Action]:
        """Where compute may be using what nobody could read again, its step ends: another expert
        may come into the slot before it hears of that."""
        step = self.requests.running_step
        told = [action.message for action in actions if isinstance(action, ToCompute)]
        is_used = step is not None and any(isinstance(message, Evicted) for message in told)
        if step is not None and is_used and not any(isinstance(m, Abort) for m in told):
            why = "an expert whose reader died could not be read again"
            actions = [*actions, RequestsFailed(why), ToCompute(Abort(step.step))]
        return self._after_failures(actions)

    def _after_failures(self, actions: Iterable[Action]) -> Iterator[Action]:
        """A failed read ends the requests of the step: remember why until compute has stopped."""
        for action in actions:
            if isinstance(action, RequestsFailed):
                self.requests.fail_step(action.text)
            else:
                yield action
