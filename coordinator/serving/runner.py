"""Runs requests one after another on an engine: what the command line's jobs stand on.

`Runner` is what a job sees. `running` gives one with processes; ``--single-process`` brings its
own (`single_process`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.actions import Ended
from coordinator.core.state import Core, EndRequest, NewRequest
from coordinator.metrics.exposition import Exposition, run_view
from coordinator.metrics.server import listen, serving
from coordinator.plan.setup import Setup
from coordinator.processes.disk_use import DiskUse
from coordinator.processes.engine import Engine
from coordinator.serving.session import open_session, restore, save
from coordinator.serving.start import started
from shm.messages import Sampled, StepDone

PROGRESS_SECONDS = 0.05
ANSWERS_SECONDS = 1.0  # a reader that told compute and not us yet may have been stopped


class RequestListener(Protocol):
    """Who is told what becomes of one request."""

    ended: Ended | None

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """New tokens; returns what ends because of them."""

    def on_ended(self, ended: Ended) -> None:
        """The request is over; sets `ended`."""

    def on_step(self, done: StepDone) -> None:
        """A step is done."""


class Runner(Protocol):
    """An engine that answers one request at a time."""

    setup: Setup
    terminal: Terminal
    signals: Signals
    found_settings: dict[str, str]  # what only the compute process can resolve, by flag

    @property
    def core(self) -> Core:
        """The decision core, for its counters."""

    @property
    def peak_bytes(self) -> int:
        """Most accounted memory seen."""

    def disk_use(self) -> DiskUse:
        """What all processes fetched and faulted since they were ready."""

    def run(self, request: NewRequest, listener: RequestListener) -> None:
        """Until the request is over; a signal cancels it. Raises `EngineError`."""


Running = Callable[..., contextlib.AbstractContextManager[Runner]]


class ProcessRunner:
    """A `Runner` over an `Engine` with processes; also the engine's listener."""

    def __init__(self, setup: Setup, terminal: Terminal, signals: Signals) -> None:
        self.setup = setup
        self.terminal = terminal
        self.signals = signals
        self.engine: Engine | None = None
        self._listener: RequestListener | None = None
        self.found_settings: dict[str, str] = {}

    @property
    def core(self) -> Core:
        """See `Runner`."""
        return self._engine.core

    @property
    def peak_bytes(self) -> int:
        """See `Runner`."""
        return self._engine.memory.peak_bytes

    def disk_use(self) -> DiskUse:
        """See `Runner`."""
        return self._engine.disk_use.look()

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def run(self, request: NewRequest, listener: RequestListener) -> None:
        """See `Runner`."""
        engine = self._engine
        self._listener = listener
        cancelled = False
        if self.signals.received is not None:
            listener.on_ended(Ended(request.submit.request, "cancelled", None))
            return
        engine.submit(request)
        while listener.ended is None:
            engine.run_once()
            if self.signals.received is not None and not cancelled:
                cancelled = True
                engine.end(EndRequest(request.submit.request, "cancelled"))
        deadline = time.monotonic() + ANSWERS_SECONDS
        while engine.core.residency.n_unanswered and time.monotonic() < deadline:
            engine.run_once()  # what their reads cost belongs to this request
        self.terminal.end_progress()

    # What the engine tells

    def on_tokens(self, sampled: tuple[Sampled, ...]) -> list[EndRequest]:
        """See `Listener`."""
        self.terminal.end_progress()
        return self._listener.on_tokens(sampled) if self._listener else []

    def on_ended(self, ended: Ended) -> None:
        """See `Listener`."""
        if self._listener is not None:
            self._listener.on_ended(ended)

    def on_step(self, done: StepDone) -> None:
        """See `Listener`."""
        if self._listener is not None:
            self._listener.on_step(done)

    def on_progress(self, process: str, phase: str, done: int, total: int) -> None:
        """See `Listener`."""
        self.terminal.progress(f"{process} {phase}", done, total)

    def on_event(self, line: str) -> None:
        """See `Listener`."""
        self.terminal.line(line)


def wait_ready(
    engine: Engine,
    setup: Setup,
    terminal: Terminal,
    signals: Signals,
    turned: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Until all processes are up and, where everything fits, all experts are read; or a signal.

    `turned` is called after every turn of the loop. Returns what only the compute process can
    resolve of the settings, by flag.
    """
    settings: dict[str, str] = {}
    while not engine.is_ready and signals.received is None:
        engine.run_once()
        turned()
    for child in engine.children:
        if "kernels" in child.detail:
            terminal.line(f"kernels: {child.detail['kernels']}")
        found = child.detail.get("settings")
        settings |= found if isinstance(found, dict) else {}
        if because := child.detail.get("experts_in_because"):
            terminal.line(f"experts: --experts-in {child.detail['experts_in']} ({because})")
        for text in child.warnings:
            terminal.warning(f"{child.name}: {text}")
    if setup.plan.everything_fits:
        engine.preload()
        # a process may die meanwhile: what comes next is for those that are up
        while (engine.n_loading or not engine.is_ready) and signals.received is None:
            n_all = setup.plan.n_experts
            terminal.progress("experts", n_all - engine.n_loading, n_all)
            engine.run_once(PROGRESS_SECONDS)
            turned()
    terminal.end_progress()
    return settings


@contextlib.contextmanager
def running(
    setup: Setup, terminal: Terminal, signals: Signals, keep_fd: int | None = None
) -> Iterator[Runner]:
    """A runner with processes, ready.

    Raises `ConfigError` (the port of the metrics), `PoolError`, `LinkError`, `OSError`,
    `EngineError`.
    """
    runner = ProcessRunner(setup, terminal, signals)
    with contextlib.ExitStack() as stack:
        host, port = setup.config.metrics_host, setup.config.metrics_port
        listener = stack.enter_context(listen(port, host)) if port else None
        session = stack.enter_context(open_session(setup))
        fds = session.fds if session is not None else ()
        engine = started(setup, runner, keep_fd=keep_fd, compute_fds=fds)
        runner.engine = stack.enter_context(engine)
        if listener is not None:
            pages = Exposition(run_view(runner.engine, setup))
            stack.enter_context(serving(listener, pages))
            terminal.line(f"metrics: http://{host}:{port}/metrics")
        runner.found_settings = wait_ready(runner.engine, setup, terminal, signals)
        if session is not None:
            restore(session, runner.engine, setup, terminal)
        yield runner
        if session is not None:
            save(session, runner.engine, setup, terminal)
