import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from read_cases import opened, pattern, strict_direct, write_file

from io_worker.page_cache import cached_bytes
from io_worker.probe import (
    MIN_TRIAL_BYTES,
    ReaderChoice,
    choose_reader,
    direct_refusal,
    faster_of,
)
from io_worker.reader_trial import Workload
from io_worker.slab_reader import READERS
from io_worker.slabs import ExpertTensor, LayerSlabs, SlabTable

DATA = pattern(50_001)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf", DATA)


@pytest.mark.parametrize("n_bytes", [1, 4095, 4096, 4097, 50_001])
def test_a_file_that_gives_equal_bytes_is_read_directly(tmp_path: Path, n_bytes: int) -> None:
    with opened(write_file(tmp_path / "model.gguf", DATA[:n_bytes])) as file:
        file = strict_direct(file)
        assert direct_refusal(file) is None
        for wanted in ("auto", "direct"):
            choice = choose_reader(wanted, [file])
            assert choice.name == "direct"
            assert choice.name in READERS
        assert choose_reader("buffered", [file]).name == "buffered"


def test_a_refusal_at_open_is_the_reason(model: Path) -> None:
    with opened(model) as file:
        refusing = replace(file, direct_fd=None, direct_refusal="O_DIRECT refused at open (why)")
        for wanted in ("auto", "direct"):
            choice = choose_reader(wanted, [refusing])
            assert choice.name == "buffered"
            assert "O_DIRECT refused at open (why)" in choice.reason
            assert "\n" not in choice.reason


def test_a_refusal_at_the_first_read_is_the_reason(model: Path) -> None:
    with opened(model) as file:
        write_only = os.open(model, os.O_WRONLY)
        refusing = replace(file, direct_fd=write_only)
        choice = choose_reader("auto", [refusing])
        assert choice.name == "buffered"
        assert "O_DIRECT refused (Bad file descriptor) at byte 0" in choice.reason
        os.close(write_only)


@pytest.mark.parametrize("position", [0, 50_000])
def test_bytes_that_differ_are_not_trusted(model: Path, tmp_path: Path, position: int) -> None:
    other = bytearray(DATA)
    other[position] ^= 1
    with opened(model) as file, opened(write_file(tmp_path / "other", bytes(other))) as liar:
        lying = replace(file, direct_fd=liar.fd)
        choice = choose_reader("direct", [lying])
        assert choice.name == "buffered"
        assert "direct and buffered bytes differ" in choice.reason


def test_one_file_of_several_may_refuse(model: Path) -> None:
    with opened(model) as file:
        good = strict_direct(file)
        refusing = replace(file, direct_fd=None, direct_refusal="O_DIRECT refused at open (why)")
        choice = choose_reader("auto", [good, refusing])
        assert choice.name == "direct"
        assert choice.reason.startswith("1 of 2 files are read buffered")


LARGE_BYTES = -(-MIN_TRIAL_BYTES // 12) * 12


def a_workload(expert_bytes: int = LARGE_BYTES, spare_bytes: int = 0) -> Workload:
    """Four experts of three ranges, so many bytes together, at the start of the file."""
    part = ExpertTensor(0, 0, expert_bytes // 12, 0, 1, 1)
    return Workload(SlabTable(4, (LayerSlabs(0, part, part, part),)), 2, spare_bytes)


def test_a_small_model_is_not_timed(model: Path) -> None:
    with opened(model) as file:
        choice = choose_reader("auto", [strict_direct(file)], a_workload(LARGE_BYTES - 12))
        assert choice == ReaderChoice("direct", "O_DIRECT works on every model file")


@pytest.mark.parametrize(
    ("spare_bytes", "name"), [(LARGE_BYTES, "buffered"), (LARGE_BYTES - 1, "direct")]
)
def test_a_model_that_is_in_memory_stays_there_if_there_is_room(
    model: Path, spare_bytes: int, name: str
) -> None:
    with opened(model) as file:
        os.pread(file.fd, file.size_bytes, 0)
        if not cached_bytes(file.fd, 0, file.size_bytes):
            pytest.skip("a kernel before 6.5 does not tell what is in the page cache")
        workload = a_workload(spare_bytes=spare_bytes)
        choice = choose_reader("auto", [strict_direct(file)], workload)
        assert choice.name == name
        if name == "buffered":
            assert choice.reason == "100 % of the model is in the page cache and may stay"


@pytest.mark.parametrize(
    ("direct", "buffered", "name"),
    [
        ([1e9, 1e9], [0.5e9, 0.6e9], "direct"),
        ([1e9, 1e9], [1.2e9, 1.2e9], "direct"),  # not worth the CPU time
        ([1e9, 1e9], [1.3e9, 1.3e9], "buffered"),
        ([1e9, 1.1e9], [1.3e9, 1.3e9], "direct"),  # once not: chance
        ([1e9], [1.3e9, 1.3e9], "direct"),  # the time was over
        ([1e9], [], "direct"),
    ],
)
def test_buffered_must_win_every_trial(
    direct: list[float], buffered: list[float], name: str
) -> None:
    choice = faster_of(direct, buffered, a_workload())
    assert choice.name == name
    assert choice.reason.startswith("tried 2 x 21.33 MiB at once: direct 1.00")


def test_a_populate_that_does_not_work_becomes_touching(model: Path) -> None:
    with opened(model) as file:
        assert choose_reader("populate", [file]) == ReaderChoice("populate", "asked for")
        os.truncate(model, 0)  # nothing to populate: an error as on a kernel that cannot
        choice = choose_reader("populate", [file])
        assert choice.name == "mmap"
        assert choice.reason.startswith("populate does not work: ")


def test_a_large_model_is_timed(tmp_path: Path) -> None:
    """The file is a hole: what counts is that it is read and told."""
    path = write_file(tmp_path / "large.gguf", b"")
    os.truncate(path, LARGE_BYTES)
    with opened(path) as file:
        if file.direct_fd is None:
            pytest.skip("a file system without O_DIRECT")
        started = time.monotonic()
        choice = choose_reader("auto", [file], a_workload())
        assert time.monotonic() - started < 20  # 0.4 where nobody else computes
        assert "GB/s" in choice.reason and "\n" not in choice.reason
