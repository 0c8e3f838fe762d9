"""Looks at the running processes and their model now and then: who hangs, what has changed.

Gathers the figures that `watch` judges by, from the core and from /proc, and says when a model file
is the reason of a death. Acts on nothing.
"""

import signal
from collections.abc import Iterable, Sequence

from coordinator.core.state import Core
from coordinator.processes.accounting import cpu_seconds, io_progress
from coordinator.processes.launch import HTTP, Child
from coordinator.processes.watch import Watch
from io_worker.reader import ModelFile, change_of


def bus_error(files: Sequence[ModelFile]) -> str:
    """What SIGBUS means for a process that maps these files."""
    return (
        f"{files[0].path}: model changed on disk, or the disk failed: "
        "a page of its mapping could not be read (SIGBUS); start again"
    )


class Health:
    """Of the processes around one core. `compute` is the name of the one that executes steps."""

    def __init__(
        self, core: Core, files: Sequence[ModelFile], compute: str, *, maps_files: bool
    ) -> None:
        self.watch = Watch()
        self._maps_files = maps_files
        self._core = core
        self._files = files
        self._compute = compute

    def hanging(self, children: Iterable[Child], now_ns: int) -> list[tuple[Child, str]]:
        """Children that make no progress, and what they should have done."""
        self.watch.look(now_ns)
        found = [(child, self._problem_of(child, now_ns)) for child in children]
        return [(child, problem) for child, problem in found if problem is not None]

    def changed_file(self) -> str | None:
        """One line if a model file was written to. Readers see it too, but only when they read."""
        changes = (change_of(file) for file in self._files)
        return next((change for change in changes if change is not None), None)

    def fault_of_a_file(self, exit_code: int) -> str | None:
        """One line if a model file explains the death of a process: starting it again is no help.

        A page of a mapped file that cannot be had ends whoever touches it with SIGBUS.
        """
        change = self.changed_file()
        if change is not None or exit_code != -signal.SIGBUS or not self._maps_files:
            return change
        return bus_error(self._files)

    def _problem_of(self, child: Child, now_ns: int) -> str | None:
        name, watch = child.name, self.watch
        if not child.is_ready:
            return "start takes too long" if watch.start_hangs(name, now_ns) else None
        if name == self._compute:
            return self._problem_of_compute(child, now_ns)
        if name == HTTP:
            watch.observe(name, (child.n_done,), now_ns)
            return "no heartbeat" if watch.http_hangs(name, now_ns) else None
        residency = self._core.residency
        if residency.n_reading(name) == 0:
            watch.rest(name, now_ns)
            return None
        watch.observe(name, (child.n_done, *io_progress(child.process.pid)), now_ns)
        if watch.io_hangs(name, now_ns):
            return "no read finished, no kernel I/O progress"
        return None

    def _problem_of_compute(self, child: Child, now_ns: int) -> str | None:
        """Between two messages only the kernel's counters tell that it works."""
        name, layers, watch = child.name, f"{child.name}: layers", self.watch
        step, residency = self._core.requests.running_step, self._core.residency
        if step is None:
            watch.rest(name, now_ns)
            watch.forget(layers)
            return None
        pid = child.process.pid
        work = (residency.n_needs, residency.counters.reads, step.step)
        watch.observe(layers, work, now_ns)
        watch.observe(name, (*work, cpu_seconds(pid), *io_progress(pid)), now_ns)
        if watch.compute_hangs(name, now_ns):
            return "no progress"
        if watch.compute_loops(layers, now_ns):
            return "a layer takes too long"
        return None
