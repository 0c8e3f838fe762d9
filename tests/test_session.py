"""Conversations that go on another day: the same answers, less to compute, bad files refused."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from arms import run_json, run_program
from running_service import RunningService

from coordinator.command.flag_values import ConfigError
from coordinator.serving.session_file import (
    SessionHeader,
    SessionKey,
    SessionWriter,
    check_key,
    saved_session,
)

STORY = "And it came to pass in those days, that there went out a decree. " * 12
KEY = SessionKey("abc", "f16", "fast", "avx2", 1000)
FLAGS = ("-p", STORY, "-n", "6", "--temperature", "0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.kv"


def write(path: Path, sequences: tuple[tuple[int, ...], ...] = ((1,) * 64,)) -> None:
    with SessionWriter(path) as writer:
        start = writer.begin(SessionHeader(KEY, sequences))
        os.pwrite(writer.fd, b"block" * 200, start)
        assert writer.complete() == start + 1000


# The file


def test_what_is_written_is_read(path: Path) -> None:
    write(path)
    with saved_session(path) as saved:
        assert saved is not None
        assert saved.header == SessionHeader(KEY, ((1,) * 64,))
        assert os.pread(saved.fd, 5, saved.data_start) == b"block"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_no_file_yet(path: Path) -> None:
    with saved_session(path) as saved:
        assert saved is None


def test_a_file_that_is_not_completed_changes_nothing(path: Path) -> None:
    write(path)
    before = path.read_bytes()
    with SessionWriter(path) as writer:
        writer.begin(SessionHeader(KEY, ()))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("place", [0, 10, 41, 50, 200, 4097, -1])
def test_every_changed_byte_is_seen(path: Path, place: int) -> None:
    write(path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="--session: "), saved_session(path):
        pass


@pytest.mark.parametrize("n_bytes", [0, 7, 47, 60, 4096, 5095])
def test_every_cut_is_seen(path: Path, n_bytes: int) -> None:
    write(path)
    os.truncate(path, n_bytes)
    with pytest.raises(ConfigError, match="--session: "), saved_session(path):
        pass


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "abd"},
        {"kv_kind": "f32"},
        {"numerics": "exact"},
        {"kernels": "neon"},
        {"block_bytes": 2000},
    ],
    ids=lambda other: next(iter(other)),
)
def test_blocks_of_another_making_are_refused(path: Path, other: dict[str, Any]) -> None:
    write(path)
    with saved_session(path) as saved:
        assert saved is not None
        check_key(saved, KEY)
        with pytest.raises(ConfigError, match="found it made with"):
            check_key(saved, dataclasses.replace(KEY, **other))


# Runs


def test_the_command_goes_on_where_it_was(path: Path) -> None:
    plain = run_json(*FLAGS)
    first = run_json(*FLAGS, "--session", str(path))
    again = run_json(*FLAGS, "--session", str(path))
    assert plain["tokens"] == first["tokens"] == again["tokens"]
    assert again["experts"]["requests"] < first["experts"]["requests"]
    other = run_program(*FLAGS, "--session", str(path), "--kv-type", "f32")
    assert other.returncode == 2
    assert "expected --kv-type f32, found it made with f16" in other.stderr
    path.write_bytes(path.read_bytes()[:-1])
    damaged = run_program(*FLAGS, "--session", str(path))
    assert damaged.returncode == 2
    assert damaged.stderr.splitlines()[-1].startswith("moe-coord: error: --session: ")


def test_a_short_text_says_why_nothing_of_it_is_kept(path: Path) -> None:
    for _ in range(2):
        done = run_program("-p", "The sea was", "-n", "2", "--session", str(path))
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1].endswith("; only whole blocks of 64 are kept")


def test_the_service_goes_on_where_it_was(path: Path) -> None:
    """Two conversations; the second start knows both, the answers are the same."""
    prompts, answers = [STORY, "Once " * 200], []
    for known in (False, True):
        with RunningService("--session", str(path)) as service:
            service.wait_ready()
            found = [service.complete(prompt, max_tokens=70, seed=3) for prompt in prompts]
            answers.append([answer["choices"] for answer in found])
            assert all((answer["timings"]["cache_n"] > 100) == known for answer in found)
            service.process.send_signal(signal.SIGTERM)
            assert service.end() == 143
            assert "saved in" in service.errors()
            service.check_gone()
    assert answers[0] == answers[1]


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    done = run_program(*FLAGS, "--session", str(tmp_path / "no" / "chat.kv"))
    assert done.returncode == 2
    assert "--session: expected a place" in done.stderr
