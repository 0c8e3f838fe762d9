"""The compute worker is killed: its request ends with an error, the next one is right. A slot that
it finds damaged is read again. And what it may and may not do to the pool."""

import contextlib
import errno
import mmap
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Session, pressed_model, session

from coordinator.core.slots import SlotState
from coordinator.core.state import PoolTarget
from shm.pool import HEADER

PROMPT = list(range(30, 60))
N_NEW = 12
SMALLEST = ("--pool", "15%")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """Tokens of undisturbed requests 1, 2 and 3."""
    with session(model, *SMALLEST) as run:
        tokens = {}
        for request in (1, 2, 3):
            run.submit(request, PROMPT, N_NEW)
            tokens[request] = run.finish(request)
    assert len({tuple(drawn) for drawn in tokens.values()}) == 3
    return tokens


@pytest.mark.parametrize(
    "flags", [("--io-workers", "1"), ("--io-workers", "0"), ("--io-threads", "2")]
)
def test_compute_killed_in_a_step(
    model: Path, expected: dict[int, list[int]], flags: tuple[str, ...]
) -> None:
    with session(model, *SMALLEST, *flags) as run:
        run.submit(1, PROMPT, N_NEW)
        run.submit(2, PROMPT, N_NEW)  # waits for its turn: not lost
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        assert run.engine.core.requests.running_step is not None
        run.kill("compute")
        assert run.finish(2) == expected[2]
        ended = run.listener.ended[1]
        assert ended.reason == "error"
        assert ended.error is not None
        assert "the compute worker died (signal 9)" in ended.error
        drawn = run.listener.tokens[1]
        assert drawn == expected[1][: len(drawn)]  # what was told before was right
        run.submit(3, PROMPT, N_NEW)
        assert run.finish(3) == expected[3]
        run.check_idle()
        assert run.engine.restarts.counts == {"compute": 1}


def test_compute_killed_at_random_moments(model: Path, expected: dict[int, list[int]]) -> None:
    with session(model, *SMALLEST) as run:
        for request, n_needs in enumerate((1, 3, 9, 22), start=10):
            before = run.engine.core.residency.n_needs
            run.submit(request, PROMPT, N_NEW)
            run.run_until(
                lambda n=before + n_needs: run.engine.core.residency.n_needs >= n  # type: ignore[misc]
            )
            run.kill("compute")
            run.finish(request)
            assert run.listener.ended[request].reason == "error"
        run.submit(1, PROMPT, N_NEW)
        assert run.finish(1) == expected[1]
        run.check_idle()


def test_a_pool_that_shrinks_while_compute_starts_again(
    model: Path, expected: dict[int, list[int]]
) -> None:
    """Who starts hears of no eviction: it holds nothing."""
    with session(model, "--pool", "60%") as run:
        run.submit(1, PROMPT, N_NEW)
        assert run.finish(1) == expected[1]
        dead = run.child("compute")
        run.kill("compute")
        run.run_until(lambda: run.engine.children.get("compute") not in (dead, None))
        usable = run.engine.core.residency.slots.usable_of_class()
        run.engine.handle(PoolTarget(tuple(n_slots // 2 for n_slots in usable)))
        assert run.engine.core.residency.resized.slots_retired > 0
        run.child("compute")
        run.submit(2, PROMPT, N_NEW)
        assert run.finish(2) == expected[2]
        assert run.engine.restarts.counts == {"compute": 1}


def test_all_processes_killed_at_once(model: Path, expected: dict[int, list[int]]) -> None:
    with session(model, *SMALLEST, "--io-workers", "2") as run:
        run.submit(1, PROMPT, N_NEW)
        run.run_until_reading("io0")
        for name in ("compute", "io0", "io1"):
            run.kill(name)
        run.finish(1)
        assert run.listener.ended[1].reason == "error"
        run.submit(2, PROMPT, N_NEW)
        assert run.finish(2) == expected[2]
        run.check_idle()


@pytest.mark.parametrize(
    "flags",
    [
        ("--pool", "60%"),
        ("--pool", "40%", "--policy", "layer-lru"),
        ("--pool", "all"),  # granted for good, once
        ("--pool", "60%", "--io-threads", "2"),
        ("--pool", "60%", "--read-unit", "layer"),
    ],
)
def test_a_damaged_slot_is_read_again(
    model: Path, expected: dict[int, list[int]], flags: tuple[str, ...]
) -> None:
    """Readiness travels as a message; the header in the pool is the check. What lies behind a
    damaged one may be damaged too, here it always is, and no token shows it."""
    is_for_good = flags == ("--pool", "all")
    with session(model, *flags) as run:
        if is_for_good:
            run.engine.preload()
        else:
            run.submit(1, PROMPT, N_NEW)
            assert run.finish(1) == expected[1]
        run.check_idle()
        damage_idle_slots(run)
        run.submit(2, PROMPT, N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(2, [])) >= 3)
        n_lost = run.engine.core.residency.counters.slots_lost
        if not is_for_good:  # nothing looks at the header again
            damage_idle_slots(run, bytes_too=False)  # they may be in use
        assert run.finish(2) == expected[2]
        assert is_for_good or run.engine.core.residency.counters.slots_lost > n_lost
        run.submit(3, PROMPT, N_NEW)
        assert run.finish(3) == expected[3]
        run.check_idle()
        assert run.engine.core.residency.counters.slots_lost > 0
        assert not run.engine.restarts.counts


def damage_idle_slots(run: Session, *, bytes_too: bool = True) -> None:
    """Flip a bit in the header of every slot that nobody has asked for, and many in its bytes.

    While a step runs, compute uses what it knows without asking: bytes may change under its hands.
    """
    slots = run.engine.core.residency.slots.slots
    with mapped_pool(run) as pool:
        for slot in slots:
            if slot.pins or slot.state is not SlotState.READY:
                continue
            pool[slot.number * HEADER.size] ^= 4
            if bytes_too:
                start = run.child("compute").spec.layout.windows_of_slots()[slot.number][0]
                pool[start : start + 4096] = bytes(4096)


@contextlib.contextmanager
def mapped_pool(run: Session) -> Iterator[mmap.mmap]:
    """The pool, to be written to."""
    spec = next(child.spec for child in run.engine.children if child.name in ("io0", "compute"))
    with mmap.mmap(spec.pool_fd, spec.layout.total_bytes) as pool:
        yield pool


def test_a_pool_that_is_written_over_all_the_time_ends_the_request(model: Path) -> None:
    with session(model, *SMALLEST) as run, mapped_pool(run) as pool:
        headers = bytes(run.child("io0").spec.layout.n_slots * HEADER.size)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                pool[: len(headers)] = headers

        writer = threading.Thread(target=write)
        writer.start()
        run.submit(1, PROMPT, N_NEW)
        run.finish(1)
        stop.set()
        writer.join()
        error = run.listener.ended[1].error
        assert error is not None
        assert "something writes over slots" in error
        run.submit(2, PROMPT, 2)
        run.finish(2)
        assert run.listener.ended[2].error is None
        run.check_idle()


def pool_mappings(pid: int) -> set[str]:
    """Permissions under which a process maps the pool."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[1] for line in lines if "memfd:moe-coord-pool" in line}


def descriptors_of_pool(pid: int) -> dict[int, int]:
    """Open flags of a process's descriptors of the pool."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:moe-coord-pool" in str(entry.readlink()):
            information = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
            flags = re.search(r"flags:\s*(\d+)", information)
            assert flags is not None
            found[int(entry.name)] = int(flags[1], 8) & os.O_ACCMODE
    return found


def test_who_may_write_the_pool(model: Path) -> None:
    with session(model, "--io-workers", "1") as run:
        compute, reader = run.child("compute").process.pid, run.child("io0").process.pid
        assert pool_mappings(compute) == {"r--s"}
        assert set(descriptors_of_pool(compute).values()) == {os.O_RDONLY}
        assert pool_mappings(reader) == {"rw-s"}
        check_sealed(run.child("io0").spec.pool_fd)
    with session(model, "--io-threads", "2") as run:
        assert pool_mappings(run.child("compute").process.pid) == {"rw-s"}


def check_sealed(fd: int) -> None:
    for n_bytes in (0, 2**40):
        with pytest.raises(OSError) as caught:
            os.ftruncate(fd, n_bytes)
        assert caught.value.errno == errno.EPERM


def test_one_thread_per_library(model: Path) -> None:
    """BLAS pools are not started beside the kernels' threads, whatever the environment says."""
    os.environ["OPENBLAS_NUM_THREADS"] = "16"
    try:
        with session(model, "--io-workers", "1", "--compute-threads", "1") as run:
            pid = run.child("compute").process.pid
            names = [p.name for p in Path(f"/proc/{pid}/task").iterdir()]
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]
    assert len(names) <= 4, names  # itself, two of ZeroMQ, one more


def test_a_signal_to_compute_alone_is_ignored(model: Path, expected: dict[int, list[int]]) -> None:
    with session(model, *SMALLEST) as run:
        run.submit(1, PROMPT, N_NEW)
        run.run_until_reading("io0")
        for name in ("compute", "io0"):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(run.child(name).process.pid, number)
        assert run.finish(1) == expected[1]
        assert not run.engine.restarts.counts
