"""Conversations that go on another day: the same answers, less to compute, bad files refused."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arms import Together, exact_config, greedy, run_json, run_program
from faults import long_model
from running_service import RunningService

from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import Signals
from coordinator.command.terminal import Terminal
from coordinator.core.state import EndRequest, NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import Setup, prepared
from coordinator.processes.engine import Engine
from coordinator.serving.runner import wait_ready
from coordinator.serving.session import Session, open_session, restore, save
from coordinator.serving.session_file import (
    SessionHeader,
    SessionKey,
    SessionWriter,
    check_key,
    saved_session,
)
from coordinator.serving.start import started

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


# Processes that die meanwhile

PROMPT = [token % 250 for token in range(200)]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """An engine of this process with a session, and what its requests became."""

    engine: Engine
    session: Session
    setup: Setup
    listener: Together

    def answer(self, request: int) -> list[int]:
        """Tokens of a request that is always the same."""
        self.engine.submit(NewRequest(greedy(request, PROMPT), 5, frozenset()))
        while request not in self.listener.ended:
            self.engine.run_once()
        assert self.listener.ended[request].error is None
        return self.listener.tokens[request]

    def pid(self) -> int:
        """Of compute."""
        child = self.engine.children.get("compute")
        assert child is not None
        return child.process.pid

    def save(self) -> None:
        """As at the end of the program."""
        save(self.session, self.engine, self.setup, Terminal())


@contextlib.contextmanager
def running(model: Path, path: Path, *flags: str) -> Iterator[Run]:
    """Not ready yet."""
    listener = Together()
    flags = ("--session", str(path), "--compute-threads", "1", *flags)
    with (
        prepared(exact_config(model, flags), read_machine()) as setup,
        open_session(setup) as session,
    ):
        assert session is not None
        with started(setup, listener, compute_fds=session.fds) as engine:
            yield Run(engine, session, setup, listener)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("model"))


def test_compute_that_dies_while_experts_are_read_is_waited_for(model: Path, path: Path) -> None:
    """What was kept is not handed to nobody."""
    with running(model, path) as run:
        wait_ready(run.engine, run.setup, Terminal(), Signals())
        expected = run.answer(1)
        run.save()
    killed = []

    def kill() -> None:
        if run.engine.is_ready and not killed:
            killed.append(run.pid())
            os.kill(run.pid(), signal.SIGKILL)
            os.waitid(os.P_PID, run.pid(), os.WEXITED | os.WNOWAIT)

    with running(model, path, "--pool", "all") as run:
        wait_ready(run.engine, run.setup, Terminal(), Signals(), kill)
        assert len(killed) == 1 and run.engine.is_ready and run.pid() not in killed
        restore(run.session, run.engine, run.setup, Terminal())
        assert run.answer(1) == expected
        assert run.engine.totals.prompt_tokens < len(PROMPT) - 100
        assert run.engine.restarts.counts == {"compute": 1}


def test_compute_that_dies_while_it_saves_is_not_waited_for(
    model: Path, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(model, path) as run:
        wait_ready(run.engine, run.setup, Terminal(), Signals())
        expected = run.answer(1)
        os.kill(run.pid(), signal.SIGSTOP)
        death = threading.Timer(0.5, os.kill, (run.pid(), signal.SIGKILL))
        death.start()
        started_at = time.monotonic()
        run.save()
        assert 0.4 < time.monotonic() - started_at < 20
        death.join()
        assert f"warning: --session: cannot save {path}: compute died" in capfd.readouterr().err
        assert run.answer(2) == expected
    assert list(path.parent.iterdir()) == []


def test_what_is_kept_is_saved_after_the_step_that_runs(
    model: Path, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a request that was ended a moment ago."""
    with running(model, path) as run:
        wait_ready(run.engine, run.setup, Terminal(), Signals())
        run.answer(1)
        run.engine.submit(NewRequest(greedy(2, PROMPT[::-1]), 5, frozenset()))
        while run.engine.core.requests.running_step is None:
            run.engine.run_once()
        os.kill(run.pid(), signal.SIGSTOP)
        run.engine.end(EndRequest(2, "cancelled"))
        going_on = threading.Timer(0.5, os.kill, (run.pid(), signal.SIGCONT))
        going_on.start()
        started_at = time.monotonic()
        run.save()
        assert time.monotonic() - started_at < 20
        going_on.join()
        assert "tokens saved in" in capfd.readouterr().err
