"""Whole runs under memory pressure: the pool shrinks, nothing is killed, tokens stay."""

import os
import signal
import time
from pathlib import Path

import pytest
from arms import run_program
from faults import pressed_model
from live_shrinking import Taking, press
from pressed_run import AMPLE, Machine, MiB, answer, running, wait_for

from coordinator.processes.limits import ResourceError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("pressed"))


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        (1, ("--pool", "all")),
        (2, ("--pool", "all")),
        (1, ("--pool", "all", "--io-workers", "2", "--reader", "buffered")),
        (2, ("--pool", "all", "--io-workers", "0", "--io-threads", "2")),
        (1, ("--pool", "60%", "--policy", "lfu")),
    ],
)
def test_tokens_stay_while_the_pool_shrinks_and_comes_back(
    model: Path, tmp_path: Path, version: int, flags: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path, version)
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


@pytest.mark.parametrize("flags", [("--experts-in", "pool"), ("--experts-in", "auto")])
def test_a_compute_started_again_takes_nothing_back(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path)
    with running(model, machine, "--pool", "all", *flags) as (engine, listener):
        expected = answer(engine, listener, 1)
        machine.leave(0)
        wait_for(engine, engine.core.residency.slots.usable_of_class()[0] - 2)
        few = engine.memory.pool_bytes
        first = engine.children.get("compute")
        assert first is not None
        os.kill(first.process.pid, signal.SIGKILL)
        while engine.children.get("compute") is first or not engine.is_up("compute"):
            engine.run_once(0.05)
        assert engine.memory.pool_bytes <= few
        assert answer(engine, listener, 2) == expected


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


@pytest.mark.alone
def test_somebody_else_in_the_group_takes_memory(tmp_path: Path) -> None:
    """With a real limit: nobody is killed, answers stay, the pool is whole 30 s after."""
    model = tmp_path / "model.gguf"
    made = run_program("synth", "olmoe", "q4_k_m", str(model), "--layers", "1")
    assert made.returncode == 0, made.stderr
    # what takes more than the room between two looks is not answered in time
    taking = Taking(mib=240, mib_per_second=40)
    flags = ("--memory", "500M", "--context", "512", "--mlock", "off", "--parallel", "1")
    try:
        found = press(model, 560 * MiB, flags, taking, n_tokens=24)
    except ResourceError as error:
        pytest.skip(f"needs root and control groups: {error}")
    assert found.least_pool_bytes < found.whole_pool_bytes - 100 * MiB
    assert found.restored_seconds is not None and found.restored_seconds < 30
    assert (found.oom_kills, found.n_deaths, found.other_exit_code) == (0, 0, 0)
    assert found.n_answers > 2
    assert found.n_different == 0
    assert found.peak_accounted_bytes <= 500 * MiB
