"""An engine under a limit that is made of files: a test says how much memory is left."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from arms import Together, exact_config, submit_of

from coordinator.core import pressure
from coordinator.core.slots import SlotState
from coordinator.core.state import NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.processes.engine import Engine
from coordinator.serving.start import started

MiB = 1 << 20
PROMPT, N_NEW = [5, 7, 11, 13, 17, 19], 12
LIMIT, AMPLE = 4000 * MiB, 1000 * MiB
WAIT_SECONDS = 60.0
QUIET_SECONDS = 1.0


@dataclass
class Machine:
    """A cgroup made of files, of version 1 or 2: says how much room a run has left."""

    root: Path
    version: int = 1

    def leave(self, room_bytes: int) -> None:
        """From now on so much is left."""
        line, folder, limit, usage = {
            1: ("4:memory:/box", "memory/box", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            2: ("0::/box", "box", "memory.max", "memory.current"),
        }[self.version]
        for name, text in {
            "proc/meminfo": "MemAvailable: 8388608 kB\n",
            "proc/self/cgroup": f"{line}\n",
            f"sys/fs/cgroup/{folder}/{limit}": f"{LIMIT}\n",
            f"sys/fs/cgroup/{folder}/{usage}": f"{LIMIT - room_bytes}\n",
            f"sys/fs/cgroup/{folder}/memory.stat": "",
        }.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)


@contextlib.contextmanager
def running(model: Path, machine: Machine, *flags: str) -> Iterator[tuple[Engine, Together]]:
    """An engine that is ready and has ample room. Its pool grows sooner than others do."""
    listener = Together()
    config = exact_config(model, ("--memory", "300M", "--kernels", "numpy", *flags))
    machine.leave(AMPLE)
    with (
        pytest.MonkeyPatch.context() as patch,
        prepared(config, read_machine()) as setup,
        started(setup, listener, root=machine.root) as engine,
    ):
        patch.setattr(pressure, "QUIET_SECONDS", QUIET_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not engine.is_ready:
            assert time.monotonic() < deadline
            engine.run_once()
        engine.preload()
        while engine.n_loading:
            engine.run_once()
        yield engine, listener


def answer(engine: Engine, listener: Together, request: int) -> list[int]:
    """Tokens of a request whose seed is the same for all of them."""
    submit = dataclasses.replace(submit_of(1, PROMPT), request=request)
    engine.submit(NewRequest(submit, N_NEW, frozenset()))
    while request not in listener.ended:
        engine.run_once()
        engine.core.check()
    return listener.tokens[request]


def wait_for(engine: Engine, n_retired: int | None) -> None:
    """Until so many slots are retired (None: some) and no read is under way."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = engine.core.residency.slots.count(SlotState.RETIRED)
        if (found > 0 if n_retired is None else found == n_retired) and not engine.n_loading:
            return
        assert time.monotonic() < deadline, f"{found} slots are retired"
        engine.run_once(0.05)
