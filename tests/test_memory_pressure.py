"""Whole runs under memory pressure: the pool shrinks, nothing is killed, tokens stay."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import pytest
from arms import PROGRAM, run_program
from faults import pressed_model
from pressed_run import AMPLE, WAIT_SECONDS, Machine, MiB, answer, running, wait_for
from running_program import service_flags

from coordinator.bench_cgroup import open_group
from coordinator.bench_group import Group, Limits
from coordinator.budget import ResourceError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("pressed"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--pool", "all"),
        ("--pool", "all", "--io-workers", "2", "--reader", "buffered"),
        ("--pool", "all", "--io-workers", "0", "--io-threads", "2"),
        ("--pool", "60%", "--policy", "lfu"),
    ],
)
def test_tokens_stay_while_the_pool_shrinks_and_comes_back(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path)
    with running(model, machine, *flags) as (engine, listener):
        expected = answer(engine, listener, 1)
        slots = engine.core.residency.slots
        (n_slots,) = slots.usable_of_class()
        machine.leave(0)
        assert answer(engine, listener, 2) == expected, "shrinking meanwhile"
        wait_for(engine, n_slots - 2)
        assert answer(engine, listener, 3) == expected
        machine.leave(AMPLE)
        ended = time.monotonic()
        wait_for(engine, 0)
        assert time.monotonic() - ended < 30
        assert answer(engine, listener, 4) == expected
        assert engine.restarts.counts == {}
        full_bytes = engine.memory.pool_bytes
        assert full_bytes == engine.memory.full_bytes
    shrinks, restored = listener.events
    assert shrinks.startswith("event=pool_shrinks room_mib=0 pool_mib=")
    assert restored.startswith("event=pool_restored room_mib=1000 pool_mib=")


def locked_pool_bytes(pid: int) -> int:
    """Pages of the pool in the locked mappings of a process."""
    total = resident = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:  # the first line of a mapping
            is_pool = "memfd:moe-coord-pool" in line
        elif name == "Rss":
            resident = int(value.split()[0]) * 1024
        elif name == "VmFlags" and is_pool and "lo" in value.split():
            total += resident
    return total


def test_the_pool_is_locked_as_far_as_it_has_memory(model: Path, tmp_path: Path) -> None:
    """What is given back is not held by its lock; what is taken again is locked when it is used."""
    machine = Machine(tmp_path)
    with running(model, machine, "--pool", "all") as (engine, listener):
        compute = engine.children.get("compute")
        assert compute is not None
        settings = compute.detail["settings"]
        assert isinstance(settings, dict)
        if settings["mlock"] != "all":
            pytest.skip("this user may not lock so much (ulimit -l)")
        whole = engine.memory.pool_bytes
        assert locked_pool_bytes(compute.process.pid) == whole
        machine.leave(0)
        wait_for(engine, engine.core.residency.slots.usable_of_class()[0] - 2)
        few = engine.memory.pool_bytes
        assert few < whole / 2
        assert locked_pool_bytes(compute.process.pid) <= few
        machine.leave(AMPLE)
        wait_for(engine, 0)
        answer(engine, listener, 1)
        assert few < locked_pool_bytes(compute.process.pid) <= whole


def test_standing_grants_come_back_with_the_pool(model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with running(model, machine, "--pool", "all") as (engine, listener):
        answer(engine, listener, 1)
        n_needs = engine.core.residency.n_needs
        answer(engine, listener, 2)
        assert engine.core.residency.n_needs == n_needs, "every layer stands"
        machine.leave(0)
        wait_for(engine, None)
        answer(engine, listener, 3)
        assert engine.core.residency.n_needs > n_needs
        machine.leave(AMPLE)
        wait_for(engine, 0)
        answer(engine, listener, 4)
        n_needs = engine.core.residency.n_needs
        answer(engine, listener, 5)
        assert engine.core.residency.n_needs == n_needs


INTRUDER = """
import sys, time
taken = []
for _ in range(int(sys.argv[1]) // (4 << 20)):
    taken.append(b"x" * (4 << 20))
    time.sleep(0.1)  # 40 MiB/s: what takes more than the room between two looks is not answered
time.sleep(float(sys.argv[2]))
"""


class Lines:
    """Lines that a process writes, read in the background."""

    def __init__(self, stream: IO[str]) -> None:
        self.seen: list[str] = []
        self._queue: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._queue.put(line)

    def wait_for(self, text: str) -> str:
        """The next line with this text."""
        while True:
            try:
                self.seen.append(self._queue.get(timeout=WAIT_SECONDS))
            except Empty:
                raise AssertionError(f"no {text!r} in {self.seen}") from None
            if text in self.seen[-1]:
                return self.seen[-1]

    def close(self) -> None:
        """The process is over: take the rest."""
        self._thread.join()
        while not self._queue.empty():
            self.seen.append(self._queue.get())


def in_group(group: Group, command: list[str], stderr: int) -> "subprocess.Popen[str]":
    """Start a command inside the group."""
    entrances = " ".join(map(str, group.entrances()))
    join = f'for f in {entrances}; do echo $$ > $f; done; exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", join, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
    )


@pytest.mark.alone
def test_somebody_else_in_the_group_takes_memory(tmp_path: Path) -> None:
    """With a real limit: nobody is killed, the pool gives way and is whole 30 s after."""
    model = tmp_path / "model.gguf"
    made = run_program("synth", "olmoe", "q4_k_m", str(model), "--layers", "1", "--sparse")
    assert made.returncode == 0, made.stderr
    name = f"moe-coord-pressure-{os.getpid()}"
    try:
        group = open_group(name, Limits(560 * MiB))
    except ResourceError as error:
        pytest.skip(f"needs root and control groups: {error}")
    try:
        flags = ["--memory", "500M", "--kernels", "numpy", "--mlock", "off", "--parallel", "1"]
        flags += service_flags()
        command = [*PROGRAM, "--model", str(model), *flags]
        run = in_group(group, command, subprocess.PIPE)
        assert run.stderr is not None
        lines = Lines(run.stderr)
        lines.wait_for("until SIGTERM")
        command = [sys.executable, "-c", INTRUDER, str(240 * MiB), "2"]
        intruder = in_group(group, command, subprocess.DEVNULL)
        shrinks = lines.wait_for("event=pool_shrinks")
        assert name in shrinks
        assert intruder.wait(WAIT_SECONDS) == 0
        ended = time.monotonic()
        lines.wait_for("event=pool_restored")
        assert time.monotonic() - ended < 30
        run.terminate()
        assert run.wait(WAIT_SECONDS) == 143
        lines.close()
        assert group.memory().oom_kills == 0
        assert not [line for line in lines.seen if "event=died" in line]
    finally:
        group.close()
