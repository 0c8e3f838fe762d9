"""What a run has done so far: totals that no restart of a process takes back.

Fed by the messages that the processes send anyway and by the core's actions; a worker that is
started again goes on under its name. The loop is the only writer. The thread that serves metrics
reads while the loop writes: every figure is one integer, no dict that it walks changes its keys,
and nothing is ever subtracted, so that what it sees is at most a message old and never falls.

Knows nothing of processes, of memory, or of how the figures are shown.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.core.actions import Action, Deliver, Ended, ToCompute, ToWorker
from shm.messages import (
    Need,
    ReadFailed,
    ReadSlabs,
    Ready,
    SlabsReady,
    SlotLease,
    Step,
    StepDone,
    Submit,
)

END_REASONS = ("eos", "length", "stop", "cancelled", "error")
# from a slab in the page cache to a disk that sleeps: three bounds per decade
READ_BOUNDS_SECONDS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip


class Histogram:
    """Durations counted by size. `counts` has a last place for those beyond all bounds."""

    def __init__(self, bounds_seconds: tuple[float, ...] = READ_BOUNDS_SECONDS) -> None:
        self.bounds_seconds = bounds_seconds
        self.counts = [0] * (len(bounds_seconds) + 1)
        self.sum_ns = 0
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_seconds]

    def observe(self, duration_ns: int) -> None:
        """Count one; a bound itself belongs below it, as Prometheus has it."""
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns


@dataclass(slots=True)
class ReaderTotals:
    """Of one process that reads slabs, over all its lives."""

    bytes_read: int = 0
    bytes_over_read: int = 0
    reads_failed: int = 0
    latency: Histogram = field(default_factory=Histogram)  # first byte asked for to last one there
    wait: Histogram = field(default_factory=Histogram)  # wanted to first byte asked for
    wanted_ns: dict[SlotLease, int] = field(default_factory=dict)  # of reads without an answer


@dataclass(slots=True)
class StepTotals:
    """Of the steps of one phase."""

    steps: int = 0
    compute_ns: int = 0
    wait_disk_ns: int = 0
    coordination_ns: int = 0


@dataclass(frozen=True, slots=True)
class _RunningStep:
    phase: str
    n_prompt_tokens: int


class Totals:
    """All that is counted of one run, beside what the core counts itself."""

    def __init__(self, readers: Iterable[str]) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.standing_uses = 0  # experts used through standing grants: hits without a `Need`
        self.requests = dict.fromkeys(END_REASONS, 0)
        self.phases = {"prompt": StepTotals(), "decode": StepTotals()}
        self.readers = {name: ReaderTotals() for name in readers}
        self._prompts: dict[int, int] = {}  # tokens of each running request's prompt
        self._step: _RunningStep | None = None
        self._layer = -1  # of the last `Need`, and when it came
        self._layer_ns = 0

    @property
    def n_running(self) -> int:
        """Requests that compute works on."""
        return len(self._prompts)

    def received(self, name: str, message: Any, now_ns: int) -> None:
        """A process sent a message. Told before the core deals with it."""
        match message:
            case Need():
                self._layer, self._layer_ns = message.layer, now_ns
            case SlabsReady() | ReadFailed() if name in self.readers:
                self._answered(self.readers[name], message)
            case StepDone():
                self._step_done(message)
            case Ready() if name in self.readers:
                self.readers[name].wanted_ns.clear()  # what its dead predecessor left

    def performed(self, action: Action, now_ns: int) -> None:
        """The core asked for an action."""
        match action:
            case ToWorker(name, ReadSlabs(reads)):
                wanted_ns = self.readers[name].wanted_ns
                for read in reads:
                    is_needed = read.layer == self._layer
                    wanted_ns[read.lease] = self._layer_ns if is_needed else now_ns
            case ToCompute(Submit() as submit):
                self._prompts[submit.request] = len(submit.prompt)
            case ToCompute(Step() as step):
                self._begin(step)
            case Deliver(sampled):
                self.generated_tokens += len(sampled)
            case Ended(request, reason):
                self._prompts.pop(request, None)
                self.requests[reason] += 1

    def _answered(self, reader: ReaderTotals, message: SlabsReady | ReadFailed) -> None:
        wanted_ns = reader.wanted_ns.pop(message.lease, None)
        if wanted_ns is None:
            return  # late or double: the core counts these
        if isinstance(message, ReadFailed):
            reader.reads_failed += 1
            return
        reader.bytes_read += message.bytes_read
        reader.bytes_over_read += message.bytes_over_read
        reader.latency.observe(message.stop_ns - message.start_ns)
        reader.wait.observe(max(0, message.start_ns - wanted_ns))

    def _begin(self, step: Step) -> None:
        """A step has slices of prompts or decodes, never both.

        A chunk that is cut at layers counts with its first part.
        """
        prompts = [part for part in step.slices if part.start < self._prompts.get(part.request, 0)]
        n_tokens = sum(part.n_tokens for part in prompts) if step.first_layer == 0 else 0
        self._step = _RunningStep("prompt" if prompts else "decode", n_tokens)

    def _step_done(self, done: StepDone) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if not done.cancelled:
            self.prompt_tokens += step.n_prompt_tokens
        self.standing_uses += done.standing_uses
        totals = self.phases[step.phase]
        totals.steps += 1
        totals.compute_ns += done.times.compute_ns
        totals.wait_disk_ns += done.times.wait_disk_ns
        totals.coordination_ns += done.times.coordination_ns
