"""Runs that record: what is killed leaves a beginning, counts belong to their model."""

import csv
import signal
import subprocess
import time
from pathlib import Path

import pytest
from arms import PROGRAM, run_json, run_program
from gguf_builder import tiny_model

from coordinator.command.config import shipped_model
from coordinator.routing.trace_file import HEADER_BYTES, of_steps, read_trace

N_LAYERS = 8  # of the shipped model


def test_a_killed_run_leaves_whole_steps_and_rows(tmp_path: Path) -> None:
    trace, rows = tmp_path / "t", tmp_path / "r.csv"
    process = subprocess.Popen(
        [*PROGRAM, "-p", "In the beginning", "-n", "900", "--ignore-eos", "--temperature", "1",
         "--seed", "1", "--trace", str(trace), "--csv", str(rows)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if trace.exists() and trace.stat().st_size > HEADER_BYTES + 5000:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    steps = list(of_steps(read_trace(trace).needs))
    assert len(steps) > 5
    assert {len(step) for step in steps} == {N_LAYERS}
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) > 5
    assert all(float(row["wall_s"]) > 0 for row in found)


@pytest.mark.parametrize("arm", [("--io-workers", "1"), ("--single-process",)])
def test_rows_add_up_to_the_record(tmp_path: Path, arm: tuple[str, ...]) -> None:
    path = tmp_path / "r.csv"
    record = run_json(
        "-p", "In the beginning", "-n", "12", "--ignore-eos", "--csv", str(path), *arm
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["token"]) for row in rows] == list(range(12))
    experts, timings = record["experts"], record["timings"]
    for name in ("bytes_read", "requests", "hits"):
        assert sum(int(row[name]) for row in rows) == experts[name]
    for column, name in (("compute_s", "compute_s"), ("read_s", "wait_disk_s"),
                         ("coordination_s", "coordination_s")):  # fmt: skip
        mean = sum(float(row[column]) for row in rows[1:]) / 11
        assert mean == pytest.approx(timings[name], abs=2e-6)


def test_tracing_changes_no_token_and_no_hit(tmp_path: Path) -> None:
    # what is guessed is read when the disk happens to idle
    flags = ["-p", "In the beginning", "-n", "12", "--ignore-eos", "--pool", "30%"]
    flags += ["--prefetch", "off"]
    plain = run_json(*flags)
    traced = run_json(*flags, "--trace", str(tmp_path / "t"))
    assert plain["tokens"] == traced["tokens"]
    for record in (plain, traced):
        read_s, reading_s = (record["experts"].pop(name) for name in ("read_s", "reading_s"))
        assert read_s >= reading_s > 0  # times, not counts
    assert plain["experts"] == traced["experts"]


def test_counts_of_one_text_serve_another_and_no_other_model(tmp_path: Path) -> None:
    hot = tmp_path / "hot.json"
    calibrate = ("calibrate", str(shipped_model()), "-p", "It was a fine morning", "-n", "8")
    done = run_program(*calibrate, "--ignore-eos", "--out", str(hot))
    assert done.returncode == 0, done.stderr
    assert f"saved in {hot}" in done.stderr
    before = hot.read_bytes()
    flags = ("-p", "In the beginning", "-n", "4", "--pool", "50%", "--policy", "static")
    assert run_json(*flags, "--hot-set", str(hot))["experts"]["requests"] > 0
    assert hot.read_bytes() == before
    other = tiny_model(tmp_path / "tiny.gguf")
    refused = run_program("--model", str(other), *flags, "--hot-set", str(hot))
    assert refused.returncode == 2
    assert "--hot-set: expected counts of this model" in refused.stderr
    assert refused.stderr.count("\n") == 1
