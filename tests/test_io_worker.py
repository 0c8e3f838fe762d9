"""Real I/O worker processes under a small parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from read_cases import content, opened, pattern, pool_of, slab_at, write_file
from worker_parent import SOURCE_FOLDER, WorkerParent

from io_worker.reader import ModelFile
from io_worker.settings import encode_settings
from shm.birth import start_time
from shm.link import remove_left_directories
from shm.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Failed,
    Heartbeat,
    ReadFailed,
    ReadSlabs,
    SlabRead,
    SlabsReady,
    Stop,
    Welcome,
    encode,
)
from shm.pool import PoolLayout, PoolMapping, SlotClass

FILE_BYTES = 500_003
DATA = pattern(FILE_BYTES)
SLAB_BYTES = 50_000
N_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """One open model file and one pool: what a worker needs."""

    path: Path
    file: ModelFile
    pool: PoolMapping
    pool_fd: int

    def slab(self, slot: int, generation: int = 1) -> SlabRead:
        offsets = (slot * 33, 200_000 + slot, FILE_BYTES - SLAB_BYTES - slot * 4096)
        return slab_at(self.pool, slot, offsets, SLAB_BYTES, generation)

    def worker(self, layout: PoolLayout | None = None, **changes: Any) -> WorkerParent:
        return WorkerParent([self.file], layout or self.pool.layout, self.pool_fd, **changes)

    def assert_right(self, read: SlabRead) -> None:
        for wanted in read.ranges:
            start = wanted.file_offset
            assert content(self.pool, wanted) == DATA[start : start + wanted.n_bytes]
        assert self.pool.holds(read.lease.slot, read.lease.generation, read.layer, read.expert)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    path = write_file(tmp_path / "model.gguf", DATA)
    with opened(path) as file, pool_of(N_SLOTS, *[SLAB_BYTES] * 3) as (pool, pool_fd):
        yield Stage(path, file, pool, pool_fd)


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


@pytest.mark.parametrize("reader", ["auto", "direct", "buffered"])
def test_a_whole_life(stage: Stage, reader: str) -> None:
    with stage.worker(reader=reader) as worker:
        detail = json.loads(worker.greet().detail)
        if reader == "buffered" or stage.file.direct_fd is None:
            assert detail["reader"] == "buffered"
        assert detail["reason"]
        assert list(worker.directory.parent.glob(worker.directory.name)) == []
        for generation in (1, 2):
            reads = [stage.slab(slot, generation) for slot in range(N_SLOTS)]
            answers = worker.read(*reads)
            assert all(isinstance(answer, SlabsReady) for answer in answers), answers
            assert {answer.lease for answer in answers} == {read.lease for read in reads}
            for read in reads:
                stage.assert_right(read)
        assert worker.stop() == 0
        assert worker.errors() == ""


def test_heartbeats_tell_the_progress(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        worker.read(*[stage.slab(slot) for slot in range(N_SLOTS)])
        before = time.monotonic()
        beats: list[Heartbeat] = []
        while len(beats) < 3:
            message = worker.next(2, beats=True)
            assert isinstance(message, Heartbeat), message
            beats.append(message)
        assert beats[-1] == Heartbeat("io0", N_SLOTS)
        assert time.monotonic() - before < 3


def test_a_file_without_direct_reading_is_read_buffered(stage: Stage) -> None:
    without = replace(stage.file, direct_fd=None, direct_refusal="O_DIRECT refused at open (test)")
    with replace(stage, file=without).worker(reader="direct") as worker:
        detail = json.loads(worker.greet().detail)
        assert detail["reader"] == "buffered"
        assert "O_DIRECT refused at open (test)" in detail["reason"]
        read = stage.slab(1)
        assert isinstance(worker.read(read)[0], SlabsReady)
        stage.assert_right(read)
        assert worker.stop() == 0


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.chmod(0)], ids=["rm", "chmod"])
def test_a_new_worker_reads_a_file_that_lost_its_name(stage: Stage, change) -> None:  # type: ignore[no-untyped-def]
    change(stage.path)
    with stage.worker() as worker:
        worker.greet()
        read = stage.slab(2)
        assert isinstance(worker.read(read)[0], SlabsReady)
        stage.assert_right(read)


@pytest.mark.parametrize("change", ["truncate", "overwrite"])
def test_a_changed_file_is_told(stage: Stage, change: str) -> None:
    with stage.worker() as worker:
        worker.greet()
        assert isinstance(worker.read(stage.slab(0))[0], SlabsReady)
        if change == "truncate":
            os.truncate(stage.path, 4096)
        else:
            with stage.path.open("r+b") as file:
                file.write(b"other")
        time.sleep(0.15)
        (answer,) = worker.read(stage.slab(1))
        assert isinstance(answer, ReadFailed)
        assert answer.model_changed
        assert "model changed on disk" in answer.text
        assert worker.stop() == 0


def test_bad_figures_are_answered_and_the_worker_lives_on(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        good = stage.slab(0)
        outside = replace(good.ranges[0], file_offset=2**62)
        bad = replace(good, ranges=(outside, *good.ranges[1:]))
        (answer,) = worker.read(bad)
        assert isinstance(answer, ReadFailed)
        assert answer.lease == bad.lease
        assert isinstance(worker.read(good)[0], SlabsReady)
        stage.assert_right(good)


GARBAGE = {
    "empty": b"",
    "random bytes": bytes(range(256)),
    "not an array": b"\x01",
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "depth 100000": b"\x91" * 100_000,
    "unknown tag": b"\x91\xa3abc",
    "slot -1": encode(Stop())[:0] + b"\x92\xa9ReadSlabs\x91\x94\x92\xff\x01\x01\x01\x90",
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
        assert worker.errors() == f"io0: {failed.text}\n"


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


def test_signals(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        worker.process.send_signal(signal.SIGINT)
        assert isinstance(worker.read(stage.slab(0))[0], SlabsReady), "Ctrl-C is the parent's"
        before = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == -signal.SIGTERM
        assert time.monotonic() - before < 1
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


def test_cores_are_taken_and_read_back(stage: Stage) -> None:
    core = min(os.sched_getaffinity(0))
    with stage.worker(cores=(core,)) as worker:
        assert json.loads(worker.greet().detail)["cores"] == [core]
        for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
            assert os.sched_getaffinity(int(task.name)) == {core}, "a thread runs elsewhere"
    with stage.worker(cores=(core, 4000)) as worker:
        detail = json.loads(worker.greet().detail)
        assert detail["cores"] == [core]
        assert "4000" in detail["warnings"][0]


def test_decoys_in_the_current_folder_are_not_imported(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "decoys"
    folder.mkdir()
    for name in ("shm", "io_worker", "zmq", "msgpack", "json", "numpy"):
        (folder / f"{name}.py").write_text("raise SystemExit('a decoy was imported')\n")
    with stage.worker(folder=folder) as worker:
        worker.greet()
        assert worker.stop() == 0


def test_numpy_is_not_loaded(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        assert "numpy" not in Path(f"/proc/{worker.process.pid}/maps").read_text()


def test_no_descriptor_but_its_own_is_open(stage: Stage) -> None:
    with stage.worker() as worker:
        worker.greet()
        folder = Path(f"/proc/{worker.process.pid}/fd")
        names = [str(link.readlink()) for link in folder.iterdir() if int(link.name) > 2]
        known = ("/dev/urandom", "pipe:", "socket:", "anon_inode:", "/memfd:moe-", str(stage.path))
        assert all(name.startswith(known) for name in names), names


PARENT = """
import sys, time
from pathlib import Path
from read_cases import opened, pool_of
from worker_parent import WorkerParent

path, moment, *program = sys.argv[1:]
with opened(Path(path)) as file, pool_of(2, 50_000, 50_000, 50_000) as (pool, pool_fd):
    worker = WorkerParent([file], pool.layout, pool_fd, program=program)
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
def test_a_worker_dies_with_its_parent(stage: Stage, moment: str, program: tuple[str, ...]) -> None:
    folders = f"{SOURCE_FOLDER}:{Path(__file__).parent}"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(stage.path), moment, *program],
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
    assert wait_until_gone(pid, 2.0)
    if moment == "ready":
        assert not Path(directory).exists(), "nothing is on the disk in steady state"
    else:
        assert Path(directory) in remove_left_directories([Path(directory).parent])
        assert not Path(directory).exists()


@pytest.mark.parametrize("arguments", [[], ["x"], ["eA=="], ["a", "b"]])
def test_a_start_by_hand_is_refused_in_one_line(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "io_worker", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE_FOLDER)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("io_worker: started by the coordinator only")
