"""``--single-process``: one process, the same answers, the same ends."""

import os
import signal
from pathlib import Path

import pytest
from arms import run_json, run_program
from bad_disk import run_at_start
from faults import long_model
from running_program import RunningProgram
from test_faults_files import truncate

ENDLESS = ("--tokens", "5,6,7", "-n", "30000", "--ignore-eos", "--context", "30100")
SINGLE = ("--single-process", "--pool", "30%")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return long_model(tmp_path)


def test_it_computes_the_same_and_counts_the_same(model: Path) -> None:
    flags = ("--model", str(model), "--tokens", "5,6,7", "-n", "12", "--pool", "30%")
    flags = (*flags, "--ignore-eos", "--policy", "lru", "--prefetch", "off")
    alone = run_json(*flags, "--single-process")
    apart = run_json(*flags, "--io-workers", "1")
    assert alone["tokens"] == apart["tokens"]
    for name in ("requests", "hits", "misses", "bytes_read", "bytes_over_read", "evictions"):
        assert alone["experts"][name] == apart["experts"][name], name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_clean_end(model: Path, number: signal.Signals, code: int) -> None:
    with RunningProgram("--model", str(model), *ENDLESS, *SINGLE) as run:
        run.wait_for_output()
        assert len(run.alive()) == 1
        os.killpg(run.process.pid, number)
        assert run.end() == code
        assert "tokens/s" in run.errors().splitlines()[-1]
        assert "Traceback" not in run.errors()


def test_a_changed_model_ends_it(model: Path) -> None:
    with RunningProgram("--model", str(model), *ENDLESS, *SINGLE) as run:
        run.wait_for_output()
        truncate(model)
        assert run.end() == 3
        assert "model changed on disk" in run.errors().splitlines()[-1]


NO_KERNELS = """
import sys
sys.modules["compute_worker.native._kernels"] = None
"""
NO_THREADS = """
import threading

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
"""


@pytest.mark.parametrize(
    ("fault", "flags", "code", "text"),
    [
        (NO_KERNELS, ("--kernels", "native"), 2, "kernels: native ones do not exist here"),
        (NO_THREADS, ("--io-threads", "4"), 4, "reading threads: cannot start one"),
    ],
)
def test_what_compute_cannot_have_is_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    flags: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    run_at_start(monkeypatch, tmp_path, fault)
    done = run_program("--model", str(model), "--tokens", "5,6,7", *SINGLE, *flags)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"moe-coord: error: {text}")


def test_it_is_no_service(model: Path) -> None:
    done = run_program("--model", str(model), *SINGLE)
    assert done.returncode == 2
    assert "--single-process: expected a prompt" in done.stderr
