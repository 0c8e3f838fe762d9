"""``--single-process``: the same decision core and the same compute side in one process.

The baseline without any coordination: no sockets, no other processes; messages are handed over as
objects. This is the one module where the coordinator and the numerical side meet, and the one that
imports both; it is reached by a clean exec (see `__main__`), never imported by the others.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from compute_worker.assemble import Assembled, assemble
from compute_worker.exit_codes import EXPECTED, ending
from coordinator.__main__ import reported, run_engine
from coordinator.command.commands import EvalCommand
from coordinator.command.config import Config
from coordinator.command.line import parse
from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.actions import Ended
from coordinator.core.state import (
    ComputeReady,
    Continue,
    Core,
    FromCompute,
    NewRequest,
    ReaderReady,
)
from coordinator.models.named_model import located
from coordinator.plan.setup import Setup, build_core
from coordinator.processes.bus_error import end_on_bus_error
from coordinator.processes.core_link import CoreLink
from coordinator.processes.disk_use import DiskUse, DiskUseTotals
from coordinator.processes.engine import COMPUTE, EXIT_MODEL, EngineError
from coordinator.processes.health import bus_error
from coordinator.processes.memory_watch import MemoryWatch
from coordinator.serving.runner import RequestListener, Runner
from coordinator.serving.start import compute_settings
from io_worker.read_queue import ReadQueue
from io_worker.reader import change_of
from io_worker.slab_reader import reader_named
from shm.free_memory import give_back_freed
from shm.messages import Cancel, Finished, Step, Submit
from shm.pool import PoolMapping, create_pool

LOOK_SECONDS = 0.5  # between two looks at the model files


class SingleRunner:
    """A `Runner` in this process."""

    def __init__(
        self,
        setup: Setup,
        terminal: Terminal,
        signals: Signals,
        link: CoreLink,
        assembled: Assembled,
    ) -> None:
        self.setup = setup
        self.terminal = terminal
        self.signals = signals
        self._link = link
        self._assembled = assembled
        self.found_settings = assembled.settings
        self._next_look = 0.0
        self._disk_use = DiskUseTotals()
        self._disk_use.begin(os.getpid())

    @property
    def core(self) -> Core:
        """See `Runner`."""
        return self._link.core

    @property
    def peak_bytes(self) -> int:
        """See `Runner`."""
        return self._link.memory.peak_bytes

    def disk_use(self) -> DiskUse:
        """See `Runner`."""
        return self._disk_use.look()

    def run(self, request: NewRequest, listener: RequestListener) -> None:
        """See `Runner`."""
        if self.signals.received is not None:
            listener.on_ended(Ended(request.submit.request, "cancelled", None))
            return
        self._link.handle(request)
        while listener.ended is None:
            self._deliver(listener)
            self._link.handle(Continue())
            while (message := self._link.poll()) is not None:
                self._execute(message, listener)
            self._deliver(listener)
            self._look_at_files()

    def _execute(self, message: Any, listener: RequestListener) -> None:
        engine = self._assembled.engine
        match message:
            case Step():
                done = engine.step(message)
                self._link.handle(FromCompute(done))
                self._deliver(listener)
                listener.on_step(done)
            case Submit():
                engine.submit(message)
            case Finished():
                engine.finish(message)
            case Cancel():
                pass  # its step is over already
            case _:
                self._assembled.feed.note(message)

    def _deliver(self, listener: RequestListener) -> None:
        while self._link.deliveries:
            action = self._link.deliveries.pop(0)
            if isinstance(action, Ended):
                listener.on_ended(action)
                continue
            self.terminal.end_progress()
            for end in listener.on_tokens(action.sampled):
                self._link.handle(end)

    def preload(self) -> None:
        """Where everything fits, read it before the first step."""
        residency = self._link.core.residency
        keys = residency.geometry.all_keys()
        self._link.perform(residency.preload(keys))
        while residency.n_to_settle and self.signals.received is None:
            self.terminal.progress("experts", len(keys) - residency.n_to_settle, len(keys))
            self._link.handle(Continue())
            while (message := self._link.poll()) is not None:
                self._assembled.feed.note(message)
            if residency.n_loading:
                self._link.wait_read()
        self.terminal.end_progress()

    def _look_at_files(self) -> None:
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            for file in self.setup.files:
                change = change_of(file)
                if change is not None:
                    raise EngineError(EXIT_MODEL, change)


@contextlib.contextmanager
def running(
    setup: Setup, terminal: Terminal, signals: Signals, keep_fd: int | None = None
) -> Iterator[Runner]:
    """A runner in this process, ready. Raises what `assemble` and the pool raise."""
    if setup.cores is not None:
        os.sched_setaffinity(0, setup.cores.compute)
    setup.model.drop_arrays()
    give_back_freed()
    pool_fd = pool = None
    if setup.config.has_pool:
        pool_fd = create_pool(setup.plan.layout)
        pool = PoolMapping(pool_fd, setup.plan.layout, writable=True)
    drop_cache = setup.config.drop_cache == "yes"
    reader = reader_named(setup.reader.name, setup.files, pool, drop_cache=drop_cache)
    queue = ReadQueue(setup.config.io_threads, reader, pool)
    core = build_core(setup)
    memory = MemoryWatch(pool_fd, setup.plan.layout, setup.plan.budget_bytes)
    link = CoreLink(core, queue, memory, signals, terminal)
    assembled = assemble(compute_settings(setup, keep_fd), pool, link, terminal.progress)
    for text in assembled.warnings:
        terminal.warning(text)
    terminal.line(f"kernels: {assembled.kernels.name}")
    link.handle(ReaderReady(COMPUTE, setup.reader_credit))
    link.handle(ComputeReady(assembled.experts_in.name == "own"))
    runner = SingleRunner(setup, terminal, signals, link, assembled)
    if setup.maps_files:
        end_on_bus_error(f"moe-coord: error: {bus_error(setup.files)}", EXIT_MODEL)
    if setup.plan.everything_fits:
        runner.preload()
    terminal.end_progress()
    memory.begin([os.getpid()], time.monotonic())
    yield runner  # the process ends after this: memory and descriptors go with it


def main() -> int:
    """Exit code of the process."""

    def job() -> int:
        command = located(parse(sys.argv[1:]), sys.argv[1:])
        assert isinstance(command, Config | EvalCommand)
        try:
            return run_engine(command, running)
        except EXPECTED as error:  # as where compute is a process of its own
            raise EngineError(*ending(error)) from error

    return reported(job)


if __name__ == "__main__":
    sys.exit(main())
