"""`moe-coord capped`: what it takes, and what becomes of the command behind it."""

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.command.bench_commands import CappedCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse

PROGRAM = [sys.executable, "-P", "-m", "coordinator", "capped", "--keep-cache"]


def test_what_stands_behind_the_dashes_is_left_alone() -> None:
    typed = ["capped", "-m", "1200M", "-r", "150MB", "-a", "128", "--", "run", "-m", "x", "--", "y"]
    assert parse(typed) == CappedCommand(
        command=("run", "-m", "x", "--", "y"),
        memory_bytes=1200 << 20,
        disk_bytes_per_second=150_000_000,
        read_ahead_kib=128,
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["--"], ["-m", "1G"], ["ls"], ["-m", "x", "--", "ls"], ["-a", "-1", "--", "a"]],
)
def test_what_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse(["capped", *arguments])


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PROGRAM, "--", *command], capture_output=True, text=True, check=False)


def test_the_commands_own_exit_code_and_output() -> None:
    done = run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    first, last = done.stderr.splitlines()
    assert first == "err"
    assert last.startswith("capped: ") and last.endswith(", exit 7")


def test_no_such_command() -> None:
    done = run("/no/such/program")
    assert done.returncode == 4
    assert "'/no/such/program': expected a command" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_disk() -> None:
    done = subprocess.run(
        [*PROGRAM, "--disk", "/proc", "-r", "1M", "--", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.startswith("moe-coord: error: --disk-rate: expected a disk under /proc")


def test_no_group_is_left() -> None:
    before = set(Path("/sys/fs/cgroup").glob("*/moe-coord-capped-*"))
    assert run("true").returncode == 0
    assert set(Path("/sys/fs/cgroup").glob("*/moe-coord-capped-*")) <= before
