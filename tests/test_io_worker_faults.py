"""Real I/O worker processes: bad messages, signals, deaths."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from worker_parent import SOURCE_FOLDER
from worker_stage import N_SLOTS, Stage, stage_in

from io_worker.settings import encode_settings
from shm.birth import SIGNALS_OF_THE_PARENT, start_time
from shm.link import remove_left_directories
from shm.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Failed,
    ReadSlabs,
    SlabsReady,
    Welcome,
    encode,
)
from shm.pool import PoolLayout, SlotClass


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder of the test's own: a start nearby removes what is left in the usual ones."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # `tmp_path` may be long for a socket
        yield Path(folder)


def is_running(pid: int) -> bool:
    """A zombie that nobody waits for does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pid: int, limit_seconds: float) -> bool:
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if not is_running(pid):
            return True
        time.sleep(0.01)
    return False


GARBAGE = {
    "empty": b"",
    "random bytes": bytes(range(256)),
    "not an array": b"\x01",
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "depth 100000": b"\x91" * 100_000,
    "unknown tag": b"\x91\xa3abc",
    "slot -1": b"\x92\xa9ReadSlabs\x91\x94\x92\xff\x01\x01\x01\x90",
    "a message for compute": encode(Cancel(1)),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_ends_the_worker_with_a_reason(stage: Stage, case: str) -> None:
    with stage.worker() as worker:
        worker.greet()
        worker.link.send(GARBAGE[case])
        failed = worker.next()
        assert isinstance(failed, Failed), failed
        assert (failed.process, failed.exit_code) == ("io0", 5)
        assert worker.wait() == 5
        assert worker.errors() == "", "the coordinator was told, and says it once"


def test_wrong_welcomes_are_refused(stage: Stage) -> None:
    with stage.worker() as probe:
        settings = probe.settings
    stranger = replace(settings, files=(replace(stage.file, fd=0),))
    welcomes = {
        "protocol": Welcome(PROTOCOL_VERSION + 1, encode_settings(settings)),
        "not valid msgpack": Welcome(PROTOCOL_VERSION, b"\xc1"),
        "reader": Welcome(PROTOCOL_VERSION, encode_settings(replace(settings, reader="magic"))),
        "queue depth": Welcome(PROTOCOL_VERSION, encode_settings(replace(settings, queue_depth=0))),
        "not inherited": Welcome(PROTOCOL_VERSION, encode_settings(stranger)),
    }
    for word, welcome in welcomes.items():
        with stage.worker() as worker:
            assert worker.next() is not None
            worker.send(welcome)
            failed = worker.next()
            assert isinstance(failed, Failed), (word, failed)
            assert word in failed.text
            assert worker.wait() == 5


def test_a_pool_that_cannot_be_mapped_is_a_resource_fault(stage: Stage) -> None:
    layout = PoolLayout((SlotClass(4, (2**29,) * 3),))
    sparse_fd = os.memfd_create("moe-coord-pool")
    os.truncate(sparse_fd, layout.total_bytes)
    limited = replace(stage, pool_fd=sparse_fd).worker(layout, prefix=("prlimit", f"--as={2**31}"))
    with limited as worker:
        worker.next()
        worker.send(Welcome(PROTOCOL_VERSION, encode_settings(worker.settings)))
        failed = worker.next()
        assert isinstance(failed, Failed), failed
        assert failed.exit_code == 4
        assert "ulimit -v" in failed.text
        assert worker.wait() == 4
    os.close(sparse_fd)


def test_a_stopped_worker_answers_late_and_once(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        worker.process.send_signal(signal.SIGSTOP)
        read = stage.slab(3)
        worker.send(ReadSlabs((read,)))
        assert worker.next(0.3) is None
        worker.process.send_signal(signal.SIGCONT)
        assert isinstance(worker.next(), SlabsReady)
        stage.assert_right(read)
        assert worker.next(0.2) is None
        assert worker.stop() == 0


@pytest.mark.parametrize("number", SIGNALS_OF_THE_PARENT)
def test_signals_to_the_whole_group_are_the_parents(stage: Stage, number: signal.Signals) -> None:
    with stage.worker() as worker:
        worker.greet()
        worker.process.send_signal(number)
        assert isinstance(worker.read(stage.slab(0))[0], SlabsReady)
        assert worker.stop() == 0
        assert worker.errors() == ""


def test_another_worker_takes_over_the_slots_of_a_killed_one(stage: Stage) -> None:
    for round_number in range(5):
        reads = [stage.slab(slot, 2 * round_number + 1) for slot in range(N_SLOTS)]
        with stage.worker() as victim:
            victim.greet()
            victim.send(ReadSlabs(tuple(reads)))
            time.sleep(round_number * 0.0005)
            victim.process.kill()
            victim.wait()
        reads = [stage.slab(slot, 2 * round_number + 2) for slot in range(N_SLOTS)]
        with stage.worker() as heir:
            heir.greet()
            assert all(isinstance(answer, SlabsReady) for answer in heir.read(*reads))
            for read in reads:
                stage.assert_right(read)


PARENT = """
import sys, time
from pathlib import Path
from read_cases import opened, pool_of
from worker_parent import WorkerParent

path, sockets, moment, *program = sys.argv[1:]
with opened(Path(path)) as file, pool_of(2, 50_000, 50_000, 50_000) as (pool, pool_fd):
    worker = WorkerParent([file], pool.layout, pool_fd, sockets=Path(sockets), program=program)
    if moment == "ready":
        worker.greet()
    print(worker.process.pid, worker.directory, flush=True)
    time.sleep(60)
"""
# An I/O worker on a system that refuses the death signal.
WITHOUT_DEATH_SIGNAL = """
import ctypes, sys
import io_worker.__main__ as worker

begin_life = worker.begin_life

def begin_life_and_refuse(arguments):
    birth = begin_life(arguments)
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    return birth

worker.begin_life = begin_life_and_refuse
sys.exit(worker.main())
"""
WORKER = ("-m", "io_worker")


@pytest.mark.parametrize(
    ("moment", "program"),
    [("ready", WORKER), ("starting", WORKER), ("ready", ("-c", WITHOUT_DEATH_SIGNAL))],
    ids=["ready", "starting", "no death signal"],
)
def test_a_worker_dies_with_its_parent(
    stage: Stage, sockets: Path, moment: str, program: tuple[str, ...]
) -> None:
    folders = f"{SOURCE_FOLDER}:{Path(__file__).parent}"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(stage.path), str(sockets), moment, *program],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid_text, directory = parent.stdout.readline().split()
    pid = int(pid_text)
    assert is_running(pid) and start_time(pid) is not None
    parent.kill()
    parent.wait(20)
    assert wait_until_gone(pid, 20.0)
    if moment == "ready":
        assert not Path(directory).exists(), "nothing is on the disk in steady state"
    else:
        assert remove_left_directories([sockets]) == [Path(directory)]
        assert not Path(directory).exists()
