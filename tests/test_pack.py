"""`moe-coord pack`: interrupted, without room, beside others; the source is never touched."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from arms import PROGRAM, pack, run_program
from gguf_builder import tiny_model
from running_program import wait_until

from coordinator.models.part_file import identity_of, part_of
from io_worker.packed_layout import CHECKSUM_BYTES, CHECKSUMS_AT
from io_worker.reader import close_files, open_files

# slowly, so that it can be seen, and ended, before it is done
SMALL_BATCHES = """
import sys
import time
from pathlib import Path
from compute_worker.arch import resolve
from coordinator.models.packed_header import packed_file
from coordinator.models.pack import write_units
from coordinator.models.part_file import identity_of, part_file
from io_worker.model_file import open_model
from io_worker.reader import open_files

model = open_model(sys.argv[1])
packed = packed_file(model, resolve(model).slabs)
files = open_files(model.paths)
with part_file(Path(sys.argv[2]), packed, identity_of(files)) as part:
    for _ in write_units(part, packed, files, batch_bytes=1):
        time.sleep(0.01)
    part.finish()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 150 units."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder / "m.gguf", n_layers=4, n_experts=32, quantisation="Q4_K_M")


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    """What an undisturbed pack writes."""
    return pack(model, model.with_name("expected.gguf")).read_bytes()


def n_written(part: Path) -> int:
    """Units of the part file whose checksum stands."""
    try:
        header = part.read_bytes()[:1_000_000]
    except FileNotFoundError:
        return 0
    if len(header) < CHECKSUMS_AT:
        return 0
    n_checksums = int.from_bytes(header[CHECKSUMS_AT - 8 : CHECKSUMS_AT], "little")
    array = header[CHECKSUMS_AT + CHECKSUM_BYTES :][: (n_checksums - 1) * CHECKSUM_BYTES]
    return sum(any(array[at : at + 8]) for at in range(0, len(array), 8))


def wait_for(out: Path, n_units: int) -> None:
    """Until so many are written, or all."""
    wait_until(lambda: out.exists() or n_written(part_of(out)) >= n_units)


def test_a_killed_pack_is_gone_on_with(model: Path, expected: bytes, tmp_path: Path) -> None:
    """SIGKILL again and again, each time a little later, ends with the same bytes."""
    out = tmp_path / "p.gguf"
    before = model.read_bytes()
    seen = [0]
    rng = random.Random(5)
    while not out.exists():
        command = [sys.executable, "-P", "-c", SMALL_BATCHES, str(model), str(out)]
        with subprocess.Popen(command) as process:
            wait_for(out, seen[-1] + rng.randrange(1, 60))
            process.kill()
        if not out.exists():
            seen.append(n_written(part_of(out)))
            assert seen[-1] > seen[-2]
            assert run_program("map", str(part_of(out))).returncode == 3  # no model yet
    assert len(seen) > 2
    assert out.read_bytes() == expected
    assert model.read_bytes() == before


def test_the_command_goes_on_and_says_so(model: Path, expected: bytes, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    interrupt(model, out)
    done = run_program("pack", str(model), str(out))
    assert done.returncode == 0, done.stderr
    assert f"goes on with {part_of(out)}" in done.stderr
    assert out.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [out]


def interrupt(model: Path, out: Path) -> None:
    """Leave an unfinished file."""
    command = [sys.executable, "-P", "-c", SMALL_BATCHES, str(model), str(out)]
    with subprocess.Popen(command) as process:
        wait_until(lambda: n_written(part_of(out)) >= 5)
        process.kill()
    assert not out.exists()


@pytest.mark.parametrize("change", ["written to", "another", "next version's"])
def test_what_another_source_left_is_started_anew(model: Path, tmp_path: Path, change: str) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(model.read_bytes())
    out = tmp_path / "p.gguf"
    interrupt(source, out)
    if change == "written to":
        data = bytearray(model.read_bytes())
        data[-20_000] ^= 1
        source.write_bytes(data)
        later = time.time_ns() + 10**9
        os.utime(source, ns=(later, later))
    elif change == "another":
        tiny_model(source, n_layers=2, n_experts=16, seed=7)
    else:
        part = bytearray(part_of(out).read_bytes())
        part[CHECKSUMS_AT - 30] ^= 0  # the key stays
        at = part.index(b"packed.version") + len("packed.version") + 4
        part[at] = 2
        part_of(out).write_bytes(part)
    done = run_program("pack", str(source), str(out))
    assert done.returncode == 0, done.stderr
    assert "goes on" not in done.stderr
    assert run_program("verify", str(out)).returncode == 0
    assert out.read_bytes() == pack(source, tmp_path / "again.gguf").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_between_two_batches(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    folder = tmp_path_factory.mktemp("large")
    source = tiny_model(folder / "m.gguf", n_layers=4, n_experts=32, n_active=4, width=768)
    out = folder / "p.gguf"
    command = [*PROGRAM, "pack", str(source), str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: part_of(out).exists() and part_of(out).stat().st_size > 0)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "the same command goes on" in errors
    assert pack(source, out).exists()
    assert run_program("verify", str(out)).returncode == 0


def test_nothing_is_written_over(model: Path, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    before = model.read_bytes()
    for out in (note, model, link):
        done = run_program("pack", str(model), str(out))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "expected a new file" in done.stderr
    part = tmp_path / "p.gguf.part"
    part.write_text("mine")
    for _ in ("a file", "a link to one"):
        done = run_program("pack", str(model), str(tmp_path / "p.gguf"))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        part.unlink()
        part.symlink_to(note)
    assert note.read_text() == "mine"
    assert model.read_bytes() == before


REFUSED: list[tuple[list[str], int, str]] = [
    (["MODEL", "nowhere/p.gguf"], 2, "expected a folder"),
    (["MODEL", "p-00001-of-00002.gguf"], 2, "a part of a set"),
    (["PACKED", "p.gguf"], 2, "expected a plain model"),
    (["missing.gguf", "p.gguf"], 3, "No such file"),
    (["MODEL"], 2, "expected OUT too"),
]


@pytest.mark.parametrize(("arguments", "code", "text"), REFUSED)
def test_what_cannot_be_packed(
    model: Path, expected: bytes, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    names = {"MODEL": model, "PACKED": model.with_name("expected.gguf")}
    paths = [str(names.get(name, tmp_path / name)) for name in arguments]
    done = run_program("pack", *paths)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert text in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_with_what_is_needed(model: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk: the kernel refuses the same call."""
    out = tmp_path / "p.gguf"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run_program("pack", str(model), str(out), preexec_fn=limit)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    assert "MiB for the packed file, found" in done.stderr
    assert not out.exists()
    assert pack(model, out).exists()


def test_a_disk_that_cannot_hold_it_is_not_begun(tmp_path: Path) -> None:
    """A sparse source of many petabytes: only its header is real."""
    done = run_program("synth", "qwen3moe-235b", "q4_k_m", str(tmp_path / "s.gguf"), "--sparse")
    assert done.returncode == 0, done.stderr
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free > (tmp_path / "s.gguf").stat().st_size:
        pytest.skip("the disk has room for a model of 140 GB")
    done = run_program("pack", str(tmp_path / "s.gguf"), str(tmp_path / "p.gguf"))
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    assert not (tmp_path / "p.gguf.part").exists()


def test_one_writer_at_a_time(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    command = [sys.executable, "-P", "-c", SMALL_BATCHES, str(model), str(out)]
    with subprocess.Popen(command) as process:
        wait_until(lambda: n_written(part_of(out)) >= 1)
        process.send_signal(signal.SIGSTOP)
        done = run_program("pack", str(model), str(out))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "wait for its end" in done.stderr
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == 0
    assert out.exists()


def test_a_kill_between_the_two_names_leaves_one(model: Path, tmp_path: Path) -> None:
    out = pack(model, tmp_path / "p.gguf")
    os.link(out, part_of(out))
    assert run_program("pack", str(model), str(out)).returncode == 2
    assert list(tmp_path.iterdir()) == [out]


def test_a_kill_before_the_name_is_made_good(model: Path, expected: bytes, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    part_of(out).write_bytes(expected)
    assert pack(model, out).read_bytes() == expected
    assert list(tmp_path.iterdir()) == [out]


def test_the_identity_of_a_source_is_of_all_its_files(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "m.gguf", split=2)
    second = first.with_name("m-00002-of-00002.gguf")
    seen = set()
    for _ in range(2):
        files = open_files([first, second])
        seen.add(identity_of(files))
        close_files(files)
        os.utime(second, ns=(10**18, 10**18))
    assert len(seen) == 2
