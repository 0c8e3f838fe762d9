"""The program from a prompt to its text, against values that other software computed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from arms import PROGRAM, greedy, run_json, run_kept, run_program, spelled
from faults import session
from gguf_builder import tiny_model
from golden_cases import CASES

from coordinator.command.config import shipped_model
from coordinator.core.state import NewRequest
from coordinator.text.tokenizer import build_tokenizer
from io_worker.model_file import open_model

GOLDEN = Path(__file__).parent / "golden"
EXACT = ("--numerics", "exact", "--temperature", "0")
DEMO_TEXTS = (
    "In the beginning",
    "It is a truth universally acknowledged, that",
    "KING.\nWhat news, my lord?",
)
MAX_RELATIVE_ERROR = 1e-4


@pytest.mark.parametrize("number", range(3))
def test_the_shipped_model_computes_the_golden_logits(number: int, tmp_path: Path) -> None:
    out = tmp_path / "kept.npz"
    with np.load(GOLDEN / "demo.npz") as golden:
        tokens = golden[f"prompt_{number}"].tolist()
        flags = ("--tokens", spelled(tokens), "--out", str(out))
        done = run_program("eval", str(shipped_model()), *flags)
        assert done.returncode == 0, done.stderr
        with np.load(out) as found:
            assert found["logits"].dtype == np.float32
            assert found["logits"].shape == (len(tokens), 4096)
            difference = found["logits"][:, golden["columns"]] - golden[f"logits_{number}"]
            assert np.abs(difference).max() <= MAX_RELATIVE_ERROR * golden[f"largest_{number}"]
            assert found["topk"].dtype == np.int16
            if number == 1:
                assert np.array_equal(found["topk"], golden["topk_1"])


def test_the_shipped_model_draws_the_golden_tokens() -> None:
    with np.load(GOLDEN / "demo.npz") as golden, session(shipped_model(), "--pool", "40%") as run:
        for number in range(3):
            submit = greedy(number, golden[f"prompt_{number}"].tolist())
            run.engine.submit(NewRequest(submit, 64, frozenset()))
            assert run.finish(number) == golden[f"greedy_{number}"].tolist()


def test_texts_become_the_golden_prompts() -> None:
    tokenizer = build_tokenizer(open_model(shipped_model()).metadata, "the shipped model")
    with np.load(GOLDEN / "demo.npz") as golden:
        for number, text in enumerate(DEMO_TEXTS):
            tokens = tokenizer.encode(text, add_special=True, parse_special=True)
            assert tokens == golden[f"prompt_{number}"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_tiny_models_compute_the_golden_values(case: str, tmp_path: Path) -> None:
    seed = list(CASES).index(case)
    model = tiny_model(tmp_path / "model.gguf", seed=seed, **CASES[case])
    out = tmp_path / "kept.npz"
    with np.load(GOLDEN / f"{case}.npz") as golden:
        submit = greedy(1, golden["prompt"].tolist())
        drawn = run_kept(model, submit, ("--pool", "50%"), out, len(golden["greedy"]))
        assert drawn == golden["greedy"].tolist()
        with np.load(out) as found:
            logits = found["logits"][golden["kept"]]
            largest = np.abs(golden["logits"]).max()
            assert np.abs(logits - golden["logits"]).max() <= MAX_RELATIVE_ERROR * largest
            n_prompt = golden["chosen"].shape[1]
            assert np.array_equal(found["topk"][:, :n_prompt], golden["chosen"])


def test_text_goes_to_standard_output_and_all_else_does_not() -> None:
    flags = ("-p", "In the beginning", "-n", "64", *EXACT)
    plain, record = run_program(*flags), run_json(*flags)
    with np.load(GOLDEN / "demo.npz") as golden:
        assert record["tokens"] == golden["greedy_0"].tolist()
    assert plain.returncode == 0
    assert plain.stdout == record["text"] + "\n"
    summary = plain.stderr.splitlines()[-1]
    assert re.search(r"64 tokens; [\d.]+ tokens/s; .*hit rate [\d.]+ %.*MiB.*ms disk", summary)
    assert record["experts"]["misses"] > 0  # a first run shows what the program is about
    assert record["experts"]["hits"] > 0


def test_the_json_of_a_run() -> None:
    record = run_json("-p", "In the beginning", "-n", "8", "--io-workers", "2", "--seed", "3")
    for name, kind in (
        ("model", str), ("prompt_tokens", int), ("tokens", list), ("text", str),
        ("stop_reason", str), ("timings", dict), ("experts", dict), ("memory", dict),
        ("faults", dict), ("settings", dict),
    ):  # fmt: skip
        assert isinstance(record[name], kind), name
    timings = record["timings"]
    for name in (
        "first_token_s", "prompt_s", "decode_s", "decode_tok_s",
        "compute_s", "wait_disk_s", "coordination_s",
    ):  # fmt: skip
        assert timings[name] >= 0, name
    parts = timings["compute_s"] + timings["wait_disk_s"] + timings["coordination_s"]
    assert parts <= timings["decode_s"] / 7 * 1.05  # per token, seven of them after the first
    experts = record["experts"]
    assert experts["requests"] == experts["hits"] + experts["misses"]
    assert experts["bytes_read"] > 0
    assert experts["bytes_over_read"] > 0
    memory = record["memory"]
    assert 0 < memory["total_peak_bytes"] <= memory["budget_bytes"]
    assert memory["pool_bytes"] > 0
    assert memory["dense_bytes"] > 0
    assert memory["kv_bytes"] > 0
    assert set(record["faults"]) >= {"major", "minor"}
    assert record["settings"]["seed"] == 3
    unresolved = {name for name, value in record["settings"].items() if value == "auto"}
    assert not unresolved
    assert record["settings"]["mlock"] in ("all", "part", "off")


def test_a_seed_repeats_and_another_differs() -> None:
    flags = ("-p", "In the beginning", "-n", "16", "--temperature", "1")
    drawn = [run_json(*flags, "--seed", seed)["tokens"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_stop_text_ends_before_it() -> None:
    text = run_json("-p", "In the beginning", "-n", "24", *EXACT)["text"]
    stop = text.split()[4]
    record = run_json("-p", "In the beginning", "-n", "24", *EXACT, "--stop", stop)
    assert record["stop_reason"] == "stop"
    assert record["text"] == text[: text.index(stop)]


def test_where_a_prompt_may_come_from(tmp_path: Path) -> None:
    expected = run_json("-p", "In the beginning", "-n", "4", *EXACT)["tokens"]
    path = tmp_path / "prompt.txt"
    path.write_text("In the beginning\n")
    assert run_json("-f", str(path), "-n", "4", *EXACT)["tokens"] == expected
    done = subprocess.run(
        [*PROGRAM, "-p", "-", "-n", "4", *EXACT, "--json"],
        input="In the beginning\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["tokens"] == expected


def test_decoys_in_the_users_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("shm", "io_worker", "compute_worker", "coordinator", "numpy", "zmq", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the decoy was imported')\n")
    flags = ("-p", "In the beginning", "-n", "4", *EXACT, "--json")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(sys.executable).with_name("moe-coord")
    programs = [[*PROGRAM], [str(script)] if script.exists() else [*PROGRAM, "--io-workers", "2"]]
    found = []
    for program, mode in [
        (programs[0], ()),
        (programs[1], ()),
        (programs[0], ("--single-process",)),
    ]:
        done = subprocess.run(
            [*program, *flags, *mode],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["tokens"])
    expected = run_json(*flags[:-1])["tokens"]
    assert found == [expected] * 3


def test_a_split_model_without_a_part_is_refused_before_it_loads(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "tiny.gguf", split=3)
    expected = run_json("--model", str(first), "--tokens", "5,6", "-n", "3")["tokens"]
    assert len(expected) == 3
    shutil.move(tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "gone")
    done = run_program("--model", str(first), "--tokens", "5,6", "-n", "3")
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "tiny-00002-of-00003.gguf" in line
