"""The loop around the decision core: receives, decodes, asks the core, performs what it says.

It starts the compute worker and the I/O workers, connects them to the core, watches them, and
replaces those that die. It decides nothing about slots or steps (`state`), nothing about hanging
(`watch`). What happens to a request is told to a `Listener`.

With `launch` this is the only module of the coordinator that touches sockets.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import zmq

from coordinator.accounting import accounted_bytes, io_progress
from coordinator.actions import Action, Deliver, Ended, StopWith, ToCompute, ToWorker
from coordinator.launch import Child, ChildSpec, start_child
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
from coordinator.watch import Watch
from shm.codec import MessageError
from shm.link import remove_left_directories
from shm.messages import (
    PROTOCOL_VERSION,
    Failed,
    Heartbeat,
    Hello,
    Need,
    Progress,
    ReadFailed,
    Ready,
    Release,
    Sampled,
    SlabsReady,
    StepDone,
    Stop,
    Welcome,
    decode,
    encode,
)

TICK_SECONDS = 0.5
STOP_TIMEOUT_SECONDS = 5.0
MAX_RESTARTS, RESTART_WINDOW_NS = 5, 60_000_000_000
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
        pool_fd: int,
        listener: Listener,
        *,
        compute_reads: bool,
    ) -> None:
        self.core = core
        self.children: dict[str, Child] = {}
        self.restarts: dict[str, int] = {}
        self.peak_bytes = 0
        self._specs = {spec.name: spec for spec in specs}
        self._credit = reader_credit
        self._pool_fd = pool_fd
        self._listener = listener
        self._compute_reads = compute_reads
        self._watch = Watch()
        self._deaths: deque[int] = deque()
        self._next_tick = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()

    # Life

    def __enter__(self) -> "Engine":
        remove_left_directories()
        try:
            for spec in self._specs.values():
                self._start(spec)
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop_all()
        finally:
            self._kill_all()
            self._context.destroy(linger=0)

    @property
    def is_ready(self) -> bool:
        """Every process is up."""
        return all(name in self.children and self.children[name].is_ready for name in self._specs)

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
        for source, _ in self._poller.poll(int(wait * 1000)):
            self._receive(source)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._tick(time.monotonic_ns())
        if self.is_compute_ready:
            self._perform(self.core.handle(Continue()))

    @property
    def is_compute_ready(self) -> bool:
        """Steps can be sent."""
        child = self.children.get(COMPUTE)
        return child is not None and child.is_ready

    # Children

    def _start(self, spec: ChildSpec) -> None:
        child = start_child(self._context, spec, time.monotonic_ns())
        self.children[spec.name] = child
        self._poller.register(child.socket, zmq.POLLIN)
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._watch.observe(spec.name, (0,), time.monotonic_ns())

    def _receive(self, source: Any) -> None:
        for child in list(self.children.values()):
            if source is child.socket:
                self._read_socket(child)
            elif source == child.pidfd:
                self._read_socket(child)  # a last `Failed` or an answer that still counts
                self._bury(child)

    def _read_socket(self, child: Child) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                data = child.socket.recv(zmq.DONTWAIT)
                try:
                    message = decode(data)
                except MessageError as error:
                    self._condemn(child, f"sent rubbish ({error})")
                    return
                self._take(child, message)

    def _take(self, child: Child, message: Any) -> None:
        if not child.said_hello and not isinstance(message, Hello):
            self._condemn(child, f"sent {type(message).__name__} before Hello")
            return
        match message:
            case Need() | Release() | StepDone() if child.name == COMPUTE:
                self._from_compute(message)
            case SlabsReady() | ReadFailed():
                self._handle(FromReader(child.name, message))
            case Heartbeat(_, n_done):
                child.n_done = n_done
            case Progress(phase, done, total):
                self._watch.observe(child.name, (done,), time.monotonic_ns())
                self._listener.on_progress(child.name, phase, done, total)
            case Hello():
                self._welcome(child, message)
            case Ready(_, detail):
                self._ready(child, detail)
            case Failed(_, exit_code, text):
                child.failure = (exit_code, text)
            case _:
                self._condemn(child, f"sent an unexpected {type(message).__name__}")

    def _from_compute(self, message: Any) -> None:
        self._handle(FromCompute(message))
        if isinstance(message, StepDone):
            self._listener.on_step(message)

    def _welcome(self, child: Child, hello: Hello) -> None:
        expected = (PROTOCOL_VERSION, child.name, child.process.pid, child.token)
        if (hello.protocol, hello.process, hello.pid, hello.token) != expected:
            self._condemn(child, "is not the process that was started")
            return
        child.said_hello = True
        child.remove_endpoint()
        child.socket.send(encode(Welcome(PROTOCOL_VERSION, child.spec.settings)), zmq.DONTWAIT)

    def _ready(self, child: Child, detail: str) -> None:
        child.is_ready = True
        child.detail = json.loads(detail)
        self._watch.observe(child.name, (1,), time.monotonic_ns())
        if child.name != COMPUTE or self._compute_reads:
            self._handle(ReaderReady(child.name, self._credit))

    def _bury(self, child: Child) -> None:
        """A child is dead: reap it, tell the core, start another."""
        self._poller.unregister(child.socket)
        self._poller.unregister(child.pidfd)
        del self.children[child.name]
        self._watch.forget(child.name)
        code = child.close()
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        why = child.failure[1] if child.failure else how
        self._listener.on_event(f"event=died process={child.name} pid={child.process.pid} {how}")
        if not child.is_ready or (child.failure and child.failure[0] != 5):
            exit_code = child.failure[0] if child.failure else 5
            raise EngineError(exit_code, f"{child.name}: {why}")
        self._restart_allowed(child, why)
        if child.name != COMPUTE or self._compute_reads:
            self._handle(ReaderDied(child.name))
        if child.name == COMPUTE:
            self._handle(ComputeDied(f"compute worker died ({why}); send the request again"))
        self.restarts[child.name] = self.restarts.get(child.name, 0) + 1
        self._start(child.spec)

    def _restart_allowed(self, child: Child, why: str) -> None:
        now_ns = time.monotonic_ns()
        self._deaths.append(now_ns)
        while self._deaths[0] < now_ns - RESTART_WINDOW_NS:
            self._deaths.popleft()
        if len(self._deaths) > MAX_RESTARTS:
            raise EngineError(
                5,
                f"{child.name}: died {len(self._deaths)} times within "
                f"{RESTART_WINDOW_NS // 1_000_000_000} s, last: {why}; not started again",
            )

    def _condemn(self, child: Child, why: str) -> None:
        """Kill a child that hangs or misbehaves; until it is reaped its slots stay untouched."""
        if child.was_killed:
            return
        self._listener.on_event(f"event=kill process={child.name} reason={why!r}")
        if child.is_ready and (child.name != COMPUTE or self._compute_reads):
            self._handle(ReaderCondemned(child.name))
        child.kill()

    # The core

    def _handle(self, event: Event) -> None:
        self._perform(self.core.handle(event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
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
        if child is None:
            return  # dead: its death is or will be handled, and takes care of what it held
        try:
            child.socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self._condemn(child, "takes no messages")

    # Watching

    def _tick(self, now_ns: int) -> None:
        pids = [os.getpid(), *(child.process.pid for child in self.children.values())]
        self.peak_bytes = max(self.peak_bytes, accounted_bytes(pids, self._pool_fd))
        for child in list(self.children.values()):
            if not child.is_ready:
                if self._watch.start_hangs(child.name, now_ns):
                    self._condemn(child, "start takes too long")
            elif child.name == COMPUTE:
                if self.core.requests.running_step is None:
                    self._watch.rest(child.name, now_ns)
                else:
                    self._watch.observe(child.name, self._compute_figures(), now_ns)
                    if self._watch.compute_hangs(child.name, now_ns):
                        self._condemn(child, "no progress")
            else:
                self._watch_reader(child, now_ns)

    def _watch_reader(self, child: Child, now_ns: int) -> None:
        if self.core.residency.n_reading(child.name) == 0:
            self._watch.rest(child.name, now_ns)
            return
        figures = (child.n_done, *io_progress(child.process.pid))
        self._watch.observe(child.name, figures, now_ns)
        if self._watch.io_hangs(child.name, now_ns):
            self._condemn(child, "no read finished, no kernel I/O progress")

    def _compute_figures(self) -> tuple[int, ...]:
        residency = self.core.residency
        step = self.core.requests.running_step
        return (residency.n_needs, residency.counters.reads, step.step if step else 0)

    # End

    def _stop_all(self) -> None:
        """Ask every child to end; what does not is killed by `_kill_all`."""
        for child in self.children.values():
            with contextlib.suppress(zmq.ZMQError):
                child.socket.send(encode(Stop()), zmq.DONTWAIT)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for child in self.children.values():
            with contextlib.suppress(Exception):
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def _kill_all(self) -> None:
        for child in self._drain():
            if child.process.poll() is None:
                child.kill()
            child.close()

    def _drain(self) -> Iterator[Child]:
        while self.children:
            yield self.children.popitem()[1]
