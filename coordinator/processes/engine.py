"""The loop around the decision core: waits, asks the core, performs what it says.

It connects the child processes (`children`) to the core, watches them, and replaces those that die.
It decides nothing about slots or steps (`state`), nothing about hanging (`health`), and touches no
socket. What happens to a request is told to a `Listener`.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coordinator.core.actions import (
    Action,
    Deliver,
    Ended,
    SlotMemory,
    StopWith,
    ToCompute,
    ToWorker,
)
from coordinator.core.state import (
    OF_COMPUTE,
    ComputeDied,
    ComputeReady,
    Continue,
    Core,
    EndRequest,
    Event,
    FromCompute,
    FromReader,
    NewRequest,
    ReaderCondemned,
    ReaderDied,
    ReaderReady,
)
from coordinator.core.step_answer import fault_of
from coordinator.processes.children import Arrived, Children, Died, Misbehaved
from coordinator.processes.disk_use import DiskUseTotals
from coordinator.processes.engine_error import EngineError as EngineError
from coordinator.processes.health import Health
from coordinator.processes.launch import HTTP, Child, ChildSpec
from coordinator.processes.listener import Front, Listener
from coordinator.processes.memory_watch import MemoryWatch
from coordinator.processes.restarts import Restarts
from coordinator.processes.totals import Totals
from io_worker.reader import ModelFile
from shm.messages import (
    BlocksSaved,
    Need,
    Progress,
    ReadFailed,
    Ready,
    SlabsReady,
    SlotsLost,
    StepDone,
)

TICK_SECONDS = 0.5
EXIT_MODEL = 3
COMPUTE = "compute"


class Engine:
    """Processes, sockets and the core of one run. Use as a context manager."""

    def __init__(
        self,
        core: Core,
        specs: list[ChildSpec],
        reader_credit: int,
        memory: MemoryWatch,
        files: Sequence[ModelFile],
        listener: Listener,
        *,
        compute_reads: bool,
        maps_files: bool,
        front: Front | None = None,
    ) -> None:
        self.core = core
        self.children = Children()
        self.restarts = Restarts()
        specs = [*specs, front.spec] if front is not None else specs
        self.names = tuple(spec.name for spec in specs)
        workers = [spec.name for spec in specs if spec.name != HTTP]
        self.totals = Totals(n for n in workers if n != COMPUTE or compute_reads)
        self.memory = memory
        self.disk_use = DiskUseTotals()
        self._specs = {spec.name: spec for spec in specs}
        self._credit = reader_credit
        self._listener = listener
        self._front = front
        self.saved: dict[int, str | None] = {}  # sequences written to a file, or why not
        self._health = Health(core, files, COMPUTE, maps_files=maps_files)
        self._next_tick = 0.0
        self._stack = contextlib.ExitStack()

    # Life

    def __enter__(self) -> "Engine":
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.children)
            for spec in self._specs.values():
                self._start(spec)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self.children.stop_all()

    @property
    def is_ready(self) -> bool:
        """Every process is up."""
        return all(self.is_up(name) for name in self._specs)

    def is_up(self, name: str) -> bool:
        """Whether a process is ready, and not being killed."""
        child = self.children.get(name)
        return child is not None and child.is_ready and not child.is_condemned

    def submit(self, request: NewRequest) -> None:
        """A request joins; its tokens come to the listener while `run_once` is called."""
        self.handle(request)

    def end(self, request: EndRequest) -> None:
        """End a request from outside."""
        self.handle(request)

    def preload(self) -> None:
        """Read every expert, in layer order, before the first step."""
        residency = self.core.residency
        self._perform(residency.preload(residency.geometry.all_keys()))

    @property
    def n_loading(self) -> int:
        """Experts that are still to be read, or on their way into compute's own memory."""
        return self.core.residency.n_to_settle

    def run_once(self, timeout_seconds: float = TICK_SECONDS) -> None:
        """Wait for something to happen, deal with it. Raises `EngineError`."""
        now = time.monotonic()
        due = min(self._next_tick - now, self.memory.seconds_until_due(now))
        for news in self.children.wait(min(timeout_seconds, max(0.0, due))):
            match news:
                case Arrived(child, message):
                    self._take(child, message)
                case Misbehaved(child, why):
                    self._condemn(child, why)
                case Died():
                    self._replace(news)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(time.monotonic_ns())
        self._watch_memory(now)
        if self.core.requests.running_step is None and self.is_up(COMPUTE):
            self._perform(self.core.decide(Continue()))

    # Children

    def _start(self, spec: ChildSpec) -> None:
        now_ns = time.monotonic_ns()
        self.children.start(spec, now_ns)
        self._health.watch.begin(spec.name, now_ns)

    def _take(self, child: Child, message: Any) -> None:
        self.totals.received(child.name, message, time.monotonic_ns())
        match message:
            case _ if child.name == COMPUTE and isinstance(message, OF_COMPUTE):
                self._from_compute(child, message)
            case SlabsReady() | ReadFailed():
                self.handle(FromReader(child.name, message))
            case Progress(phase, done, total):
                self._health.watch.observe(child.name, (done,), time.monotonic_ns())
                self._listener.on_progress(child.name, phase, done, total)
            case Ready() if not child.is_ready:
                self._ready(child)
            case BlocksSaved(request, error) if child.name == COMPUTE:
                self.saved[request] = error
            case _ if self._front is not None and child.name == HTTP:
                self._front.received(message)
            case _:
                self._condemn(child, f"sent an unexpected {type(message).__name__}")

    def _from_compute(self, child: Child, message: Any) -> None:
        if isinstance(message, Need | StepDone):
            requests = self.core.requests
            fault = fault_of(message, requests.running_step, may_stop=requests.may_stop)
            if fault is not None:
                self._condemn(child, fault)
        if child.is_condemned:
            return  # who goes wrong, or hangs, is heard no more
        self.handle(FromCompute(message))
        if isinstance(message, StepDone):
            self._listener.on_step(message)
        elif isinstance(message, SlotsLost):
            slots = ",".join(str(lease.slot) for lease in message.lost)
            self._listener.on_event(f"event=slots_lost layer={message.layer} slots={slots}")

    def _ready(self, child: Child) -> None:
        child.is_ready = True
        self.disk_use.begin(child.process.pid)
        self._health.watch.begin(child.name, time.monotonic_ns())
        if child.name in self.totals.readers:
            self.handle(ReaderReady(child.name, self._credit))
        if child.name == COMPUTE:
            self.handle(ComputeReady(child.detail["experts_in"] == "own"))
        if self._front is not None and child.name == HTTP:
            self._front.started()
        if self.is_ready:
            self.memory.begin(self._pids(), time.monotonic())

    def _replace(self, death: Died) -> None:
        """A child is dead: tell the core, start another. Raises if that is not worth a try."""
        child, name = death.child, death.child.name
        self._health.watch.forget(name)
        fault = self._health.fault_of_a_file(death.code)
        if fault is not None:
            raise EngineError(EXIT_MODEL, fault)
        if (refusal := self.restarts.refusal(death, time.monotonic_ns())) is not None:
            raise EngineError(refusal[0], f"{name}: {refusal[1]}")
        self._listener.on_event(
            f"event=died process={name} pid={child.process.pid} cause={death.why!r}"
        )
        if name in self.totals.readers:
            self.handle(ReaderDied(name))
        if name == COMPUTE:
            text = f"the compute worker died ({death.why}); send the request again"
            self.handle(ComputeDied(text))
        if self._front is not None and name == HTTP:
            self._front.died()
        self._start(child.spec)

    def _condemn(self, child: Child, why: str) -> None:
        """Kill a child that hangs or misbehaves; until it is reaped its slots stay untouched."""
        if child.is_condemned:
            return
        child.is_condemned = True
        self._listener.on_event(f"event=kill process={child.name} cause={why!r}")
        if child.is_ready and child.name in self.totals.readers:
            self.handle(ReaderCondemned(child.name))
        self.children.kill(child, why)

    # The core

    def handle(self, event: Event) -> None:
        """Let the core decide, and do what it says as it comes."""
        self._perform(self.core.decide(event))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToCompute(message):
                    self.send(COMPUTE, message)
                case ToWorker(name, message):
                    self.send(name, message)
                case Deliver(sampled):
                    for end in self._listener.on_tokens(sampled):
                        self.handle(end)
                case Ended():
                    self._listener.on_ended(action)
                case StopWith(exit_code, text):
                    raise EngineError(exit_code, text)
                case _ if isinstance(action, SlotMemory):
                    self.memory.perform(action)
            self.totals.performed(action, time.monotonic_ns())  # nobody waits for it

    def send(self, name: str, message: Any) -> None:
        """Send to a process that is up; one that takes nothing is killed.

        One that still starts has no experts, sequences or reads that a message could be about, and
        nobody at its socket perhaps: for the core it is not there yet.
        """
        child = self.children.get(name)
        if child is not None and self.is_up(name) and not self.children.send(name, message):
            self._condemn(child, "takes no messages")

    # Watching

    def _tick(self, now_ns: int) -> None:
        self.memory.account(self._pids(), now_ns / 1e9)
        self.disk_use.look()
        for child, why in self._health.hanging(self.children, now_ns):
            self._condemn(child, why)
        change = self._health.changed_file()
        if change is not None:
            raise EngineError(EXIT_MODEL, change)

    def _watch_memory(self, now: float) -> None:
        if self.core.requests.running_step is not None:
            self.memory.account(self._pids(), now)
        if (target := self.memory.look(self._pids(), now)) is not None:
            self.handle(target)
        for line in self.memory.take_lines():
            self._listener.on_event(line)

    def _pids(self) -> Iterator[int]:  # seldom looked at: nothing is made before
        yield from [os.getpid(), *(child.process.pid for child in self.children)]
