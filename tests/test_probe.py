import os
from dataclasses import replace
from pathlib import Path

import pytest
from read_cases import opened, pattern, strict_direct, write_file

from io_worker.probe import choose_reader, direct_refusal
from io_worker.slab_reader import READERS

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
