"""`moe-coord plan` end to end, and the two probes behind it."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from arms import pack, run_json, run_program
from gguf_builder import tiny_model

PROBES = ("--probe-seconds", "0.2")
BURST_SECONDS = 20.0  # more than any disk takes for a few small experts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    return tiny_model(folder / "model.gguf", arch="qwen3moe", quantisation="Q4_K_M", split=2)


def planned(*flags: str) -> dict[str, Any]:
    done = run_program("plan", *flags, *PROBES, "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_the_plan_of_the_shipped_model() -> None:
    record = planned("--io-workers", "2", "--queue-depth", "2")
    memory = record["memory"]
    parts = ("processes", "page_table", "dense", "kv", "scratch", "pool")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    assert memory["total_bytes"] <= memory["budget_bytes"]
    assert memory["slots"] * 10 // memory["experts"] == 4 - 1, "two fifths of the shipped model"
    assert set(record["disk"]["burst_s"]) == {"1", "2"}
    assert record["settings"]["reads_in_flight"] == 4
    even, concentrated = record["forecast"]["even"], record["forecast"]["concentrated"]
    assert 0 < even["hit_rate"] < concentrated["hit_rate"] < 1
    assert 0 < even["tokens_per_second"] <= concentrated["tokens_per_second"]
    assert even["first_token_seconds"] > 0
    assert record["advice"]
    packing = record["packing"]
    assert packing["packed_seconds"] > 0 and packing["plain_seconds"] > 0
    is_faster = packing["packed_seconds"] < packing["plain_seconds"]
    assert packing["is_worth_it"] == (is_faster and max(packing["gains"].values()) >= 1.05)
    assert packing["is_worth_it"] == any("moe-coord pack" in line for line in record["advice"])
    assert len(record["sweep"]) == 1, "its pool is the same with any memory"


def test_less_and_more_memory(model: Path) -> None:
    record = planned(str(model), "--memory", "300M")
    budgets = [row["memory_bytes"] for row in record["sweep"]]
    assert budgets and budgets == sorted(budgets)


def test_what_a_prompt_needs_is_planned_for(model: Path) -> None:
    memory = planned(str(model), "--prompt-tokens", "100", "-n", "28", "--memory", "200M")["memory"]
    assert (memory["context_tokens"], memory["chunk_tokens"]) == (128, 128)


def test_the_plan_for_people(model: Path) -> None:
    done = run_program("plan", str(model), "--memory", "300M", *PROBES)
    assert done.returncode == 0, done.stderr
    for begin in ("model: ", "mode: ", "memory: ", "machine: ", "disk: ", "arithmetic: ",
                  "token cycle: ", "forecast, with concentrated routing: ",
                  "  or, with even routing: ", "start: ",
                  "advice: every expert stays in memory"):  # fmt: skip
        assert sum(line.startswith(begin) for line in done.stdout.splitlines()) == 1, begin


@pytest.mark.parametrize("reader", ["direct", "mmap"])
def test_a_plan_of_recorded_routing(model: Path, tmp_path: Path, reader: str) -> None:
    """It expects the very hits of a run with the same pool."""
    trace = tmp_path / "trace"
    flags = ["--memory", "300M", "--reader", reader, "--prefetch", "off"]
    flags += ["--pool", "50%"] if reader == "direct" else []
    run = run_json(
        "--model", str(model), "--tokens", "5,6,7", "-n", "20", "--ignore-eos",
        "--trace", str(trace), "--csv", str(tmp_path / "rows"), *flags,
    )  # fmt: skip
    record = planned(str(model), *flags, "--routing", str(trace))
    assert record["expected"] == "recorded"
    found = record["forecast"]["recorded"]["hit_rate"]
    assert set(record["forecast"]) == {"recorded", "concentrated", "even"}
    if reader == "mmap":
        assert 0 < found <= 1, "the kernel knows the hits"
        return
    with (tmp_path / "rows").open() as file:
        rows = list(csv.DictReader(file))[1:]  # without the prompt's
    hits, requests = (sum(int(row[name]) for row in rows) for name in ("hits", "requests"))
    assert found == pytest.approx(hits / requests)
    assert run["experts"]["hits"] > 0
    short = planned(str(model), *flags, "--routing", str(trace), "-n", "3")
    hits, requests = (sum(int(row[name]) for row in rows[:3]) for name in ("hits", "requests"))
    assert short["forecast"]["recorded"]["hit_rate"] == pytest.approx(hits / requests)


def test_a_trace_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    run_json("-p", "In the beginning", "-n", "2", "--trace", str(trace))
    done = run_program("plan", str(model), "--memory", "300M", "--routing", str(trace))
    assert done.returncode == 2
    assert "--routing: expected a trace of this model" in done.stderr


def test_a_plan_of_the_page_cache(model: Path) -> None:
    record = planned(str(model), "--reader", "mmap", "--memory", "300M")
    assert record["memory"]["pool_bytes"] == 0
    assert record["sweep"] == []
    assert record["forecast"]["even"]["hit_rate"] == 1, "there is room for this model"


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--memory", "20M"], 4, "memory: expected at least "),
        (["--probe-seconds", "0"], 2, "--probe-seconds:"),
        (["--prompt-tokens", "0"], 2, "--prompt-tokens:"),
        (["--temperature", "1"], 2, "--temperature"),
        (["missing.gguf"], 3, "missing.gguf: "),
    ],
)
def test_what_cannot_be_planned(flags: list[str], code: int, text: str) -> None:
    done = run_program("plan", *flags)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert text in line


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("depth", ["0", "3"])
def test_bursts_of_a_split_model(model: Path, depth: str) -> None:
    flags = ("--layers", "2", "--experts", "8", "--sizes", "1,3", "--depth", depth)
    done = run_module("io_worker.burst_speed", str(model), *flags, "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["reader"] in ("direct", "buffered")
    assert 0 < record["burst_s"]["1"] < BURST_SECONDS
    assert 0 < record["burst_s"]["3"] < BURST_SECONDS


def test_bursts_as_of_a_packed_file(model: Path, tmp_path: Path) -> None:
    """Where the file is packed already there is nothing to compare."""
    packed = pack(model, tmp_path / "packed.gguf")
    flags = ("--layers", "2", "--experts", "8", "--sizes", "1,2", "--seconds", "0.1")
    for path, kinds in ((model, {"burst_s", "packed_burst_s"}), (packed, {"burst_s"})):
        done = run_module("io_worker.burst_speed", str(path), *flags, "--packed-too")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert {key for key in record if key.endswith("burst_s")} == kinds
        assert all(0 < record[kind]["2"] < BURST_SECONDS for kind in kinds)


@pytest.mark.parametrize("kernels", ["auto", "numpy"])
def test_steps_of_a_model(model: Path, kernels: str) -> None:
    flags = ("--threads", "1", "--kernels", kernels, "--prompt-tokens", "20", "--seconds", "0.1")
    done = run_module("compute_worker.step_speed", str(model), *flags)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    for phase in ("decode", "prompt"):
        assert 0 < record[phase]["dense_s"] < 10
        assert 0 < record[phase]["expert_s"] < 10


@pytest.mark.parametrize(
    "command",
    [("io_worker.burst_speed", "--layers", "1", "--experts", "1"), ("compute_worker.step_speed",)],
)
def test_a_probe_refuses_what_is_no_model(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    module, *flags = command
    done = run_module(module, str(path), *flags)
    assert done.returncode == 3
    assert "no.gguf: " in done.stderr
