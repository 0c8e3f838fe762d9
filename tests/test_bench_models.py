"""Which files are measured: named, written, or copied because somebody holds their pages."""

import fcntl
import mmap
import os
import signal
from pathlib import Path

import pytest

from coordinator.bench.cache import cached_bytes
from coordinator.bench.models import (
    COPY_BYTES,
    COPY_PREFIX,
    copy_file,
    measured_model,
    models_of,
    own_files,
)
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.config import shipped_model
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import StopSignals
from coordinator.models.synth import MIXES, SHAPES, Model, write_model
from io_worker.model_file import open_model

MODEL = shipped_model()


@pytest.mark.parametrize(
    ("bench", "part"),
    [
        (BenchCommand(), "expected a GGUF file, found none"),
        (BenchCommand(synth=True), "--out DIR"),
        (BenchCommand((MODEL,), synth=True), "no MODEL with it"),
        (BenchCommand((MODEL, MODEL)), "expected 1 file, found 2"),
        (BenchCommand((MODEL,), question="quant"), "expected 2 files, found 1"),
    ],
)
def test_files_that_cannot_be(bench: BenchCommand, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        models_of(bench)


def test_a_synthetic_model_is_written_once(tmp_path: Path) -> None:
    """Its own writer is slow, so a sparse file of its name stands in: it must be kept."""
    path = tmp_path / "synthetic-olmoe-q4_k_m-1-layers.gguf"
    model = Model("synthetic-olmoe-q4_k_m", SHAPES["olmoe"], MIXES["q4_k_m"], 1)
    write_model(path, model, sparse=True, force=False, report=lambda done, whole: None)
    before = path.stat().st_mtime_ns
    assert models_of(BenchCommand(synth=True, layers=1, out=tmp_path)) == (path,)
    assert path.stat().st_mtime_ns == before
    assert measured_model(path).name.startswith("synthetic-")


def test_a_copy_is_the_same_model_and_goes_away(tmp_path: Path) -> None:
    model = measured_model(MODEL)
    with own_files([model], tmp_path, "always", StopSignals()) as copies:
        copy = copies[MODEL]
        assert copy.name == MODEL.name and copy.stat().st_ino != MODEL.stat().st_ino
        assert copy.read_bytes() == MODEL.read_bytes()
        assert open_model(copy).fingerprint == model.fingerprint
    assert list(tmp_path.iterdir()) == []
    with own_files([model], tmp_path, "never", StopSignals()) as copies:
        assert copies == {}


def test_a_copy_goes_to_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """As the blocks do, which are written later."""
    place = tmp_path / "new" / "folder"
    with own_files([measured_model(MODEL)], place, "always", StopSignals()) as copies:
        assert copies[MODEL].read_bytes() == MODEL.read_bytes()
    (tmp_path / "file").touch()
    wrong = own_files([measured_model(MODEL)], tmp_path / "file", "always", StopSignals())
    with pytest.raises(ConfigError, match="--out: expected a folder"), wrong:
        pass


def test_copies_of_a_run_that_was_killed_go_with_the_next(tmp_path: Path) -> None:
    """Gigabytes that nobody sees; those of a run that goes on stay, and what was just made."""
    left, used, young = (tmp_path / f"{COPY_PREFIX}{name}" for name in ("left", "used", "young"))
    for place in (left, used, young):
        place.mkdir()
        (place / "m.gguf").touch()
        if place is not young:
            os.utime(place, (0, 0))
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with own_files([measured_model(MODEL)], tmp_path, "always", StopSignals()) as copies:
        own = copies[MODEL].parent
        os.utime(own, (0, 0))
        assert sorted(tmp_path.iterdir()) == sorted([used, young, own])
        with own_files([measured_model(MODEL)], tmp_path, "always", StopSignals()):
            assert copies[MODEL].exists()
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == [used, young]


def test_a_signal_ends_the_copying(tmp_path: Path) -> None:
    """Behind the first piece; no other file is begun."""
    large, target, place = tmp_path / "large.gguf", tmp_path / "copy.gguf", tmp_path / "place"
    place.mkdir()
    large.touch()
    os.truncate(large, COPY_BYTES + 4096)
    stop = StopSignals(signal.SIGTERM)
    copy_file(large, target, stop)
    with own_files([measured_model(MODEL)], place, "always", stop) as copies:
        assert copies == {}
    assert list(place.iterdir()) == []
    if target.stat().st_size == large.stat().st_size:
        pytest.skip("needs a file system that does not clone")
    assert target.stat().st_size == COPY_BYTES


def test_a_file_is_copied_only_while_its_pages_are_held(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL.read_bytes() + bytes(20 << 20))
    model = measured_model(path)
    with own_files([model], tmp_path, "auto", StopSignals()) as copies:
        assert copies == {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        held[:]  # mapped and touched: cannot be dropped
        if cached_bytes([path]) < 20 << 20:
            pytest.skip("needs a file system with a page cache")
        with own_files([model], tmp_path, "auto", StopSignals()) as copies:
            assert copies[path].exists()
