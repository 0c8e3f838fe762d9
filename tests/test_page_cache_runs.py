"""Whole runs where the page cache has the experts: what they tell, and how they end."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from arms import run_json, run_program, spelled
from faults import long_model, pressed_model, session
from running_program import RunningProgram

from coordinator.processes.engine import EngineError

PROMPT = list(range(30, 60))
N_NEW = 12
ARMS = {
    "faults": ("--reader", "mmap", "--io-workers", "0"),
    "mmap": ("--reader", "mmap"),
    "willneed": ("--reader", "willneed"),
    "populate": ("--reader", "populate", "--io-workers", "2"),
    "populate in threads": ("--reader", "populate", "--io-threads", "2"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(original: Path) -> list[int]:
    with session(original) as run:
        run.submit(1, PROMPT, N_NEW)
        return run.finish(1)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that may be hurt."""
    return Path(shutil.copy(original, tmp_path / "model.gguf"))


def drop_pages(path: Path) -> None:
    """The next run has to read from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def experts_of(run: dict[str, dict[str, int | None]]) -> tuple[int | None, ...]:
    return tuple(run["experts"][name] for name in ("hits", "misses", "evictions"))


@pytest.mark.parametrize("arm", ["faults", "willneed"])
def test_the_json_says_what_the_kernel_counted(model: Path, arm: str) -> None:
    drop_pages(model)
    run = run_json(
        "--model", str(model), "--tokens", spelled(PROMPT), "-n", "4", "--ignore-eos", *ARMS[arm]
    )
    assert experts_of(run) == (None, None, None)
    assert run["experts"]["requests"] > 0
    assert 0 < run["experts"]["bytes_read"] <= 2 * model.stat().st_size
    assert run["faults"]["of_all_processes"]["minor"] > 0
    assert run["faults"]["of_all_processes"]["major"] >= (1 if arm == "faults" else 0)
    assert run["memory"]["pool_bytes"] == 0
    assert run["memory"]["total_peak_bytes"] <= run["memory"]["budget_bytes"]
    assert (run["settings"]["policy"], run["settings"]["pool"]) == ("none", None)


def test_the_first_lines_say_what_the_budget_does_not_count(model: Path) -> None:
    done = run_program(
        "--model", str(model), "--tokens", "5,6", "-n", "3", "--ignore-eos", "--memory", "400M",
        *ARMS["mmap"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "reader mmap (asked for); the page cache keeps experts" in done.stderr
    assert "no pool (the page cache has the experts and is not counted here)" in done.stderr
    assert "major page faults per token" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arm", ["mmap", "willneed"])
def test_a_killed_worker_changes_no_token(model: Path, expected: list[int], arm: str) -> None:
    with session(model, *ARMS[arm]) as run:
        run.submit(1, PROMPT, N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        run.kill("io0")
        assert run.finish(1) == expected
        run.kill("compute")
        run.run_until(lambda: not run.engine.is_up("compute"))  # its requests would end with it
        run.submit(2, PROMPT, N_NEW)
        assert len(run.finish(2)) == N_NEW
        run.check_idle()


@pytest.mark.parametrize("arm", ARMS)
def test_a_file_that_was_cut_ends_the_run_and_is_no_storm(model: Path, arm: str) -> None:
    """Whoever touches a page that is not there dies of SIGBUS: worker or compute."""
    with session(model, *ARMS[arm]) as run:
        run.submit(1, PROMPT, 100 * N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        os.truncate(model, model.stat().st_size // 2)
        with pytest.raises(EngineError, match="model changed on disk") as caught:
            run.run_until_error()
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)
        assert sum(run.engine.restarts.counts.values()) == 0


def test_mapped_weights_of_a_file_that_was_cut(model: Path) -> None:
    with session(model, "--dense", "mapped", "--pool", "all") as run:
        run.submit(1, PROMPT, 100 * N_NEW)
        run.run_until(lambda: len(run.listener.tokens.get(1, [])) >= 3)
        os.truncate(model, 4096)
        with pytest.raises(EngineError, match="model changed on disk") as caught:
            run.run_until_error()
        assert caught.value.exit_code == 3


def test_a_bus_error_without_a_changed_file_is_the_disk(model: Path) -> None:
    """A page that the disk could not give: nothing else tells of it."""
    with session(model, *ARMS["mmap"]) as run:
        child = run.child("compute")
        os.kill(child.process.pid, signal.SIGBUS)
        with pytest.raises(EngineError, match=r"or the disk failed.*\(SIGBUS\)") as caught:
            run.run_until_error()
        assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "flags",
    [
        ("--reader", "mmap"),
        ("--reader", "willneed"),
        ("--reader", "mmap", "--single-process"),
        ("--reader", "mmap", "--single-process", "--io-threads", "1"),
        ("--dense", "mapped", "--single-process", "--pool", "all"),
    ],
    ids=" ".join,
)
def test_the_command_ends_with_3(tmp_path: Path, flags: tuple[str, ...]) -> None:
    model = long_model(tmp_path)
    wanted = ("--tokens", "5,6", "-n", "30000", "--ignore-eos", "--context", "30100")
    with RunningProgram("--model", str(model), *wanted, *flags) as run:
        run.wait_for_output()
        os.truncate(model, model.stat().st_size // 2)
        assert run.end() == 3
        last = run.errors().splitlines()[-1]
        assert last.startswith("moe-coord: error: ")
        assert "model changed on disk" in last and str(model) in last
        run.check_gone()
