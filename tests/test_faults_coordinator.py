"""The program is killed, interrupted or loses its output: nothing is left, and it says one line."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from arms import run_program
from bad_disk import run_at_start
from faults import long_model
from running_program import (
    RunningProgram,
    service_flags,
    socket_directories,
    wait_until,
)

from coordinator.processes.children import STOP_TIMEOUT_SECONDS
from coordinator.routing.trace_file import HEADER_BYTES

ENDLESS = ("--tokens", "5,6,7", "-n", "30000", "--ignore-eos", "--context", "30100")
IDLE_LINE = "until SIGTERM"
SLOW_START = """
import sys, time
time.sleep({seconds} if "{module}" in sys.orig_argv else 0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(long_model(tmp_path_factory.mktemp("model")))


def test_killed_while_idle(model: str) -> None:
    with RunningProgram("--model", model, "--io-workers", "2", *service_flags()) as run:
        run.wait_for(IDLE_LINE)
        assert sorted(run.children()) == ["compute", "http", "io0", "io1"]
        assert run.files() == []  # in steady state
        run.process.kill()
        run.check_gone()
        assert run.files() == []


@pytest.mark.parametrize("flags", [("--io-workers", "2"), ("--io-threads", "2")])
def test_killed_in_mid_generation(model: str, flags: tuple[str, ...]) -> None:
    with RunningProgram("--model", model, *ENDLESS, *flags) as run:
        run.wait_for_output()
        run.process.kill()
        run.check_gone()
        assert run.files() == []


def test_killed_during_start(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At moments of its first second; what is left on the disk goes with the next start."""
    rng = random.Random(4)
    pids = []
    for _ in range(5):
        with RunningProgram("--model", model, *ENDLESS) as run:
            time.sleep(rng.uniform(0.15, 0.9))
            run.process.kill()
            run.check_gone()
            pids.append(run.process.pid)
    with monkeypatch.context() as patched:
        run_at_start(patched, tmp_path, SLOW_START.format(seconds=1, module="io_worker"))
        with RunningProgram("--model", model, *ENDLESS) as run:  # and one that surely leaves some,
            wait_until(lambda: bool(run.files()))
            run.process.kill()
            run.check_gone()
            pids.append(run.process.pid)  # unless a start nearby has removed them
    done = run_program("--model", model, "--tokens", "5,6", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert [directory for pid in pids for directory in socket_directories(pid)] == []


def test_the_whole_group_is_killed(model: str) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        run.wait_for_output()
        os.killpg(run.process.pid, signal.SIGKILL)
        run.check_gone()
        assert run.files() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_group_is_one_clean_end(
    model: str, number: signal.Signals, code: int
) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        run.wait_for_output()
        os.killpg(run.process.pid, number)
        assert run.end() == code
        run.check_gone()
        errors = run.errors()
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].count("tokens/s") == 1  # the summary
        assert "error" not in errors


def test_what_was_ignored_at_the_start_stays_ignored(model: str) -> None:
    """As with nohup, and in the background of a script."""
    command = RunningProgram.command("--model", model, *service_flags())
    with subprocess.Popen(
        ["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh", *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stderr is not None
        while IDLE_LINE not in process.stderr.readline():
            assert process.poll() is None
        for number in (signal.SIGHUP, signal.SIGINT):
            os.killpg(process.pid, number)
        time.sleep(0.7)
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 143


def test_interrupted_with_json(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"  # written with every token, when nothing else is said yet
    flags = ("--json", "--io-workers", "0", "--trace", str(trace))
    with RunningProgram("--model", model, *ENDLESS, *flags) as run:
        wait_until(lambda: trace.exists() and trace.stat().st_size > HEADER_BYTES)
        os.killpg(run.process.pid, signal.SIGINT)
        output, errors = run.process.communicate(timeout=60)
        assert run.process.returncode == 130
        assert b'"stop_reason": "cancelled"' in output
        assert b"Traceback" not in errors


@pytest.mark.parametrize("delay_seconds", [0.3, 0.6])
def test_interrupted_during_start(model: str, delay_seconds: float) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        while not run.children():
            time.sleep(0.005)
        time.sleep(delay_seconds - 0.3)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130
        run.check_gone()
        assert run.files() == []
        assert "Traceback" not in run.errors()


def test_the_second_signal_ends_at_once(model: str) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        run.wait_for_output()
        for pid in run.children().values():
            os.kill(pid, signal.SIGSTOP)  # so that a clean end would take its full time
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.7)  # two that come before the first is handled would be one
        assert run.process.poll() is None
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end(STOP_TIMEOUT_SECONDS - 1) == 130
        run.check_gone()


def test_idle_and_terminated(model: str) -> None:
    with RunningProgram("--model", model, "--io-workers", "1", *service_flags()) as run:
        run.wait_for(IDLE_LINE)
        started = time.monotonic()
        run.process.terminate()
        assert run.end(5) == 143
        assert time.monotonic() - started < STOP_TIMEOUT_SECONDS - 1
        run.check_gone()
        assert "Traceback" not in run.errors()


def test_compute_killed_ends_the_command(model: str) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        run.wait_for_output()
        os.kill(run.children()["compute"], signal.SIGKILL)
        assert run.end() == 5
        run.check_gone()
        last = run.errors().splitlines()[-1]
        assert last.startswith("moe-coord: error: the compute worker died (signal 9)")


@pytest.mark.parametrize("name", ["io0", "compute"])
def test_a_child_that_dies_before_it_is_ready(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "compute_worker" if name == "compute" else "io_worker"
    run_at_start(monkeypatch, tmp_path, SLOW_START.format(seconds=100, module=module))
    with RunningProgram("--model", model, *ENDLESS) as run:
        wait_until(lambda: name in run.children())
        os.kill(run.children()[name], signal.SIGKILL)
        assert run.end() == 5
        assert run.errors().splitlines()[-1] == f"moe-coord: error: {name}: signal 9"
        run.check_gone()
        assert run.files() == []


def test_a_reader_that_goes_away_ends_the_answer(model: str) -> None:
    with RunningProgram("--model", model, *ENDLESS) as run:
        run.wait_for_output()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.end() in (0, 141)
        run.check_gone()
        assert "Traceback" not in run.errors()
        assert "Exception ignored" not in run.errors()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_output(model: str, flags: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*RunningProgram.command("--model", model, "--tokens", "5,6", "-n", "3"), *flags],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert last.startswith("moe-coord: error: standard output: cannot write")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream(model: str, closed: int) -> None:
    """The numbers 0 to 2 go to the next files that are opened: none of ours may land there."""
    command = RunningProgram.command("--model", model, "--tokens", "5,6", "-n", "3", "--json")
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-', "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ('"tokens"' in done.stdout) == (closed != 1)
