"""Real I/O worker processes under a small parent: what they do when all is well."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from worker_parent import SOURCE_FOLDER
from worker_stage import N_SLOTS, Stage, stage_in

from shm.messages import (
    Heartbeat,
    ReadFailed,
    SlabsReady,
    SlotsPunched,
)
from shm.pool import punch_hole


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


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
            message = worker.next(beats=True)
            assert isinstance(message, Heartbeat), message
            beats.append(message)
        assert beats[-1] == Heartbeat("io0", N_SLOTS)
        assert time.monotonic() - before < 20  # one in a second, where nobody else computes


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
        outside = good.ranges[0]._replace(file_offset=2**62)
        bad = good._replace(ranges=(outside, *good.ranges[1:]))
        (answer,) = worker.read(bad)
        assert isinstance(answer, ReadFailed)
        assert answer.lease == bad.lease
        assert isinstance(worker.read(good)[0], SlabsReady)
        stage.assert_right(good)


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


def test_a_slot_that_was_punched_is_read_into_again(stage: Stage) -> None:
    with stage.worker(reader="buffered") as worker:
        worker.greet()
        worker.read(stage.slab(1), stage.slab(2))
        windows = stage.pool.windows
        punch_hole(stage.pool_fd, windows[1][0], windows[2][0] - windows[1][0])
        worker.send(SlotsPunched((1,)))
        again = stage.slab(1, 2)
        (answer,) = worker.read(again)
        assert isinstance(answer, SlabsReady)
        stage.assert_right(again)
        stage.assert_right(stage.slab(2))
        assert worker.stop() == 0
