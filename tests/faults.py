"""An engine inside the test whose processes can be hurt, and what must hold after every fault.

The invariants: tokens equal an undisturbed run or the request ended with an error; every request
ended once; no process, no descriptor and no file of ours is left; every slot is free or ready.
"""

import contextlib
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arms import Together, exact_config, submit_of
from gguf_builder import tiny_model

from coordinator.core.actions import Ended
from coordinator.core.slots import SlotState
from coordinator.core.state import NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.processes.engine import Engine
from coordinator.processes.launch import Child
from coordinator.serving.start import started

WAIT_SECONDS = 60.0


@dataclass
class Watched(Together):
    """Counts how often each request ended."""

    n_ends: Counter[int] = field(default_factory=Counter)

    def on_ended(self, ended: Ended) -> None:
        """Collect."""
        super().on_ended(ended)
        self.n_ends[ended.request] += 1


@dataclass
class Session:
    """A running engine and its listener."""

    engine: Engine
    listener: Watched
    killed: set[int] = field(default_factory=set)

    def submit(self, request: int, prompt: list[int], n_new: int) -> None:
        """A request with its own seed; the same arguments give the same tokens."""
        self.engine.submit(NewRequest(submit_of(request, prompt), n_new, frozenset()))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Turn the loop until then; the test fails when nothing moves any more."""
        core = self.engine.core
        moved = None
        deadline = 0.0
        while not is_over():
            figures = (core.residency.n_needs, core.residency.n_loading, len(self.listener.ended))
            if figures != moved:
                moved, deadline = figures, time.monotonic() + WAIT_SECONDS
            assert time.monotonic() < deadline, "the engine waits for something that never comes"
            self.engine.run_once(0.05)
            core.check()

    def finish(self, request: int) -> list[int]:
        """Run until the request is over; its tokens."""
        self.run_until(lambda: request in self.listener.ended)
        return self.listener.tokens.get(request, [])

    def run_until_error(self) -> None:
        """Run until an error is raised, also if that is after the last answer only."""
        self.run_until(lambda: False)

    def child(self, name: str) -> Child:
        """The living child of a name, up and ready."""

        def is_up() -> bool:
            child = self.engine.children.get(name)
            return child is not None and child.is_ready

        self.run_until(is_up)
        child = self.engine.children.get(name)
        assert child is not None
        return child

    def run_until_reading(self, name: str) -> Child:
        """Until the reader has reads to do."""
        self.child(name)
        self.run_until(lambda: self.engine.core.residency.n_reading(name) > 0)
        return self.child(name)

    def kill(self, name: str) -> None:
        """SIGKILL to the process of this name, ready or not; each process is killed once."""

        def lives() -> bool:
            child = self.engine.children.get(name)
            return child is not None and child.process.pid not in self.killed

        self.run_until(lives)
        child = self.engine.children.get(name)
        assert child is not None
        self.killed.add(child.process.pid)
        os.kill(child.process.pid, signal.SIGKILL)

    def check_idle(self) -> None:
        """Every slot is free or ready, none in use; every request ended once; nothing runs."""
        self.run_until(lambda: self.engine.core.residency.n_loading == 0)
        slots = self.engine.core.residency.slots
        at_rest = (SlotState.FREE, SlotState.READY, SlotState.ADOPTED)
        assert all(slot.state in at_rest for slot in slots.slots)
        assert all(slot.pins == 0 for slot in slots.slots)
        assert set(self.listener.n_ends.values()) <= {1}
        assert self.engine.core.requests.is_idle


@contextlib.contextmanager
def session(model: Path, *flags: str, max_running: int = 1) -> Iterator[Session]:
    """An engine with its processes; checks that nothing of it is left behind.

    One compute thread, unless asked for more: on a busy machine several wait for each other.
    """
    if "--compute-threads" not in flags:
        flags = (*flags, "--compute-threads", "1")
    listener = Watched()
    gc.collect()  # what earlier tests left is not closed in between
    before = open_descriptors()
    with (
        prepared(exact_config(model, flags), read_machine(), n_sequences=max_running) as setup,
        started(setup, listener) as engine,
    ):
        running = Session(engine, listener)
        running.run_until(lambda: engine.is_ready)
        children = [child.process.pid for child in engine.children]
        yield running
        children += [child.process.pid for child in engine.children]
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert open_descriptors() == before


def open_descriptors() -> set[str]:
    """Numbers of the descriptors that this process holds."""
    own = Path("/proc/self/fd")
    return {found.name for found in own.iterdir() if found.exists()}  # less the one of this walk


def pressed_model(folder: Path) -> Path:
    """Many experts per token and large enough slabs, so that a smallest pool reads all the time."""
    return tiny_model(
        folder / "pressed.gguf", n_layers=4, n_experts=8, n_active=4, quantisation="Q8_0", width=256
    )


def long_model(folder: Path) -> Path:
    """Answers may be long, so that there is time to do harm."""
    return tiny_model(
        folder / "long.gguf", n_layers=3, n_experts=8, n_active=2, context_length=2**17
    )
