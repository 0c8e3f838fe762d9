"""The loop around the decision core: waits, asks the core, performs what it says.

It connects the child processes (`children`) to the core, watches them, and replaces those that die.
It decides nothing about slots or steps (`state`), nothing about hanging (`health`), and touches no
socket. What happens to a request is told to a `Listener`.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.accounting import accounted_bytes
from coordinator.actions import Action, Deliver, Ended, StopWith, ToCompute, ToWorker
from coordinator.children import Arrived, Children, Died, Misbehaved
from coordinator.disk_use import DiskUseTotals
from coordinator.health import Health
from coordinator.launch import Child, ChildSpec
from coordinator.restarts import MAX_DEATHS, Restarts
from coordinator.state import (
    ComputeDied,
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
from coordinator.totals import Totals
from io_worker.reader import ModelFile
from shm.messages import (
    Need,
    Progress,
    ReadFailed,
    Ready,
    Release,
    Sampled,
    SlabsReady,
    StepDone,
)

TICK_SECONDS = 0.5
EXIT_MODEL, EXIT_INTERNAL = 3, 5
COMPUTE = "compute"


class EngineError(Exception):
    """The engine cannot go on; the text is one line, `exit_code` the process's."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Listener(Protocol):
    """Who is told what becomes of requests and processes."""

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """New tokens; returns the requests that end because of them (stop strings)."""

    def on_ended(self, ended: Ended) -> None:
        """A request is over."""

    def on_step(self, done: StepDone) -> None:
        """A step is done."""

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """A long phase of a process's start moves on."""

    def on_event(self, line: str) -> None:
        """Something an operator wants to know, key=value."""


class Engine:
    """Processes, sockets and the core of one run. Use as a context manager."""

    def __init__(
        self,
        core: Core,
        specs: list[ChildSpec],
        reader_credit: int,
        pool_fd: int | None,
        files: Sequence[ModelFile],
        listener: Listener,
        *,
        compute_reads: bool,
        maps_files: bool,
    ) -> None:
        self.core = core
        self.children = Children()
        self.restarts = Restarts()
        self.names = tuple(spec.name for spec in specs)
        self.totals = Totals(n for n in self.names if n != COMPUTE or compute_reads)
        self.accounted_bytes = self.peak_bytes = 0
        self.disk_use = DiskUseTotals()
        self._specs = {spec.name: spec for spec in specs}
        self._credit = reader_credit
        self._pool_fd = pool_fd
        self._listener = listener
        self._compute_reads = compute_reads
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
        return all(self._is_up(name) for name in self._specs)

    @property
    def is_compute_ready(self) -> bool:
        """Steps can be sent."""
        return self._is_up(COMPUTE)

    def _is_up(self, name: str) -> bool:
        child = self.children.get(name)
        return child is not None and child.is_ready

    def submit(self, request: NewRequest) -> None:
        """A request joins; its tokens come to the listener while `run_once` is called."""
        self._handle(request)

    def end(self, request: EndRequest) -> None:
        """End a request from outside."""
        self._handle(request)

    def preload(self) -> None:
        """Read every expert, in layer order, before the first step."""
        geometry = self.core.residency.geometry
        keys = [
            (layer, expert)
            for layer in sorted(geometry.class_of_layer)
            for expert in range(geometry.n_experts)
        ]
        self._perform(self.core.residency.preload(keys))

    @property
    def n_loading(self) -> int:
        """Experts that are still to be read."""
        return self.core.residency.n_loading

    def run_once(self, timeout_seconds: float = TICK_SECONDS) -> None:
        """Wait for something to happen, deal with it. Raises `EngineError`."""
        wait = min(timeout_seconds, max(0.0, self._next_tick - time.monotonic()))
        for news in self.children.wait(wait):
            match news:
                case Arrived(child, message):
                    self._take(child, message)
                case Misbehaved(child, why):
                    self._condemn(child, why)
                case Died():
                    self._replace(news)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._tick(time.monotonic_ns())
        if self.is_compute_ready:
            self._perform(self.core.handle(Continue()))

    # Children

    def _start(self, spec: ChildSpec) -> None:
        now_ns = time.monotonic_ns()
        self.children.start(spec, now_ns)
        self._health.watch.begin(spec.name, now_ns)

    def _take(self, child: Child, message: Any) -> None:
        self.totals.received(child.name, message, time.monotonic_ns())
        match message:
            case Need() | Release() | StepDone() if child.name == COMPUTE:
                self._from_compute(message)
            case SlabsReady() | ReadFailed():
                self._handle(FromReader(child.name, message))
            case Progress(phase, done, total):
                self._health.watch.observe(child.name, (done,), time.monotonic_ns())
                self._listener.on_progress(child.name, phase, done, total)
            case Ready(_, detail):
                self._ready(child, detail)
            case _:
                self._condemn(child, f"sent an unexpected {type(message).__name__}")

    def _from_compute(self, message: Any) -> None:
        self._handle(FromCompute(message))
        if isinstance(message, StepDone):
            self._listener.on_step(message)

    def _ready(self, child: Child, detail: str) -> None:
        child.is_ready = True
        child.detail = json.loads(detail)
        self.disk_use.begin(child.process.pid)
        self._health.watch.begin(child.name, time.monotonic_ns())
        if child.name != COMPUTE or self._compute_reads:
            self._handle(ReaderReady(child.name, self._credit))

    def _replace(self, death: Died) -> None:
        """A child is dead: tell the core, start another. Raises if that is not worth a try."""
        child, name = death.child, death.child.name
        self._health.watch.forget(name)
        fault = self._health.fault_of_a_file(death.code)
        if fault is not None:
            raise EngineError(EXIT_MODEL, fault)
        exit_code = child.failure[0] if child.failure else EXIT_INTERNAL
        if exit_code != EXIT_INTERNAL or (self.restarts.is_first(name) and not child.is_ready):
            raise EngineError(exit_code, f"{name}: {death.why}")
        if not self.restarts.allowed(name, time.monotonic_ns()):
            text = f"died more than {MAX_DEATHS} times within a minute, last: {death.why}"
            raise EngineError(EXIT_INTERNAL, f"{name}: {text}; not started again")
        self._listener.on_event(
            f"event=died process={name} pid={child.process.pid} cause={death.why!r}"
        )
        if name != COMPUTE or self._compute_reads:
            self._handle(ReaderDied(name))
        if name == COMPUTE:
            text = f"the compute worker died ({death.why}); send the request again"
            self._handle(ComputeDied(text))
        self._start(child.spec)

    def _condemn(self, child: Child, why: str) -> None:
        """Kill a child that hangs or misbehaves; until it is reaped its slots stay untouched."""
        if child.killed_because:
            return
        self._listener.on_event(f"event=kill process={child.name} cause={why!r}")
        if child.is_ready and (child.name != COMPUTE or self._compute_reads):
            self._handle(ReaderCondemned(child.name))
        self.children.kill(child, why)

    # The core

    def _handle(self, event: Event) -> None:
        self._perform(self.core.handle(event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self.totals.performed(action, time.monotonic_ns())
            match action:
                case ToCompute(message):
                    self._send(COMPUTE, message)
                case ToWorker(name, message):
                    self._send(name, message)
                case Deliver(sampled):
                    for end in self._listener.on_tokens(sampled):
                        self._handle(end)
                case Ended():
                    self._listener.on_ended(action)
                case StopWith(exit_code, text):
                    raise EngineError(exit_code, text)

    def _send(self, name: str, message: Any) -> None:
        child = self.children.get(name)
        if not self.children.send(name, message) and child is not None:
            self._condemn(child, "takes no messages")

    # Watching

    def _tick(self, now_ns: int) -> None:
        pids = [os.getpid(), *(child.process.pid for child in self.children)]
        self.accounted_bytes = accounted_bytes(pids, self._pool_fd)
        self.peak_bytes = max(self.peak_bytes, self.accounted_bytes)
        self.disk_use.look()
        for child, why in self._health.hanging(self.children, now_ns):
            self._condemn(child, why)
        change = self._health.changed_file()
        if change is not None:
            raise EngineError(EXIT_MODEL, change)
