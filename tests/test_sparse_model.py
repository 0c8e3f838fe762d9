"""A file far larger than memory and disk: the header of Qwen3-235B, its weights a hole."""

import json
from pathlib import Path

import pytest
from arms import run_json, run_program

from coordinator.processes.available_memory import available_memory

MiB = 1 << 20
PLAN_MIB = 3900  # of a machine with 4 GB
RUN_FLAGS = ("--tokens", "5,77,300", "-n", "4", "--ignore-eos")


def sparse_model(folder: Path, *flags: str) -> Path:
    path = folder / "sparse.gguf"
    made = run_program("synth", "qwen3moe-235b", "q4_k_m", str(path), "--sparse", *flags)
    assert made.returncode == 0, made.stderr
    return path


def test_a_plan_for_4_gb(tmp_path: Path) -> None:
    # some more: other programs may take of it before the plan is made
    if available_memory().n_bytes < (PLAN_MIB + 500) * MiB:
        pytest.skip(f"needs {PLAN_MIB} MiB of free memory")
    path = sparse_model(tmp_path)
    done = run_program(
        "plan", str(path), "--memory", f"{PLAN_MIB}M", "--probe-seconds", "0.2", "--json"
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["total_bytes"] <= PLAN_MIB * MiB < path.stat().st_size // 30
    assert memory["slots"] >= 2 * 8, "one token's experts of a layer, and those that follow"


def test_four_tokens_of_a_part_of_it(tmp_path: Path) -> None:
    """Two of its 94 layers, whose dense weights do not fit either."""
    path = sparse_model(tmp_path, "--layers", "2")
    record = run_json("--model", str(path), "--memory", "700M", *RUN_FLAGS)
    assert len(record["tokens"]) == 4
    assert record["settings"]["dense"] == "mapped"
    assert record["memory"]["total_peak_bytes"] <= 700 * MiB
    n_steps, n_layers, n_active = 4, 2, 8  # with weights of zero all tokens choose alike
    assert record["experts"]["requests"] == n_steps * n_layers * n_active
