"""The comparison as a whole: order, prompts, table, and a run of the real program."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench import (
    order_of_round,
    participants,
    prompt_of_round,
    reference,
    run_bench,
)
from coordinator.bench_block import Participant
from coordinator.bench_commands import ARM, PEER, Arm, BenchCommand, PeerCommand
from coordinator.bench_table import block_line, table
from coordinator.bench_timings import Timings
from coordinator.config import shipped_model
from coordinator.flag_values import ConfigError


def nobody(name: str) -> Participant:
    return Participant(name, "test", lambda prompt, seed: [], lambda seen: Timings(None, ()))


def test_rounds_run_there_and_back() -> None:
    who = [nobody(name) for name in "ABC"]
    orders = ["".join(each.name for each in order_of_round(who, number)) for number in range(4)]
    assert orders == ["ABC", "CBA", "ABC", "CBA"]


def test_prompts_rotate_and_come_again() -> None:
    bench = BenchCommand(Path("m"), n_prompt=64)
    prompts = [prompt_of_round(bench, number, 1000) for number in range(3)]
    assert all(len(prompt) == 64 and max(prompt) < 1000 for prompt in prompts)
    assert prompts[0] != prompts[1] != prompts[2]
    assert prompts == [prompt_of_round(bench, number, 1000) for number in range(3)]
    assert prompt_of_round(BenchCommand(Path("m"), n_prompt=64, seed=2), 0, 1000) != prompts[0]


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("a: --io-workers 2", Arm("a", ("--io-workers", "2"))),
        ("two words:--pool 40%", Arm("two words", ("--pool", "40%"))),
        ("defaults:", Arm("defaults", ())),
        ("q: -m 'a b.gguf' --core-plan compute=0,io=1",
         Arm("q", ("-m", "a b.gguf", "--core-plan", "compute=0,io=1"))),
    ],
)  # fmt: skip
def test_arms_as_they_are_typed(text: str, arm: Arm) -> None:
    assert ARM.parse(text) == arm


def test_peers_as_they_are_typed() -> None:
    assert PEER.parse("llama.cpp=/opt/llama-bench -t 2") == PeerCommand(
        "llama.cpp", ("/opt/llama-bench", "-t", "2")
    )
    for text in ("", "name", "=x", "name=", "a:b=x", "n='"):
        with pytest.raises(ValueError):
            PEER.parse(text)
    for text in ("", "name", ": x", "a=b: x", "n: '"):
        with pytest.raises(ValueError):
            ARM.parse(text)


BENCH_PEER = PeerCommand("p", ("/opt/llama-bench",))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "moe-coord"),
        ({"arms": (Arm("a", ()), Arm("b", ()))}, "a"),
        ({"arms": (Arm("a", ()),), "peers": (BENCH_PEER,)}, "p"),
        ({"arms": (Arm("a", ()),), "peers": (BENCH_PEER,), "against": "a"}, "a"),
    ],
)
def test_what_the_others_are_divided_by(settings: dict[str, Any], expected: str) -> None:
    bench = BenchCommand(Path("m"), **settings)
    assert reference(bench) == expected
    assert expected in {each.name for each in participants(bench)}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"arms": (Arm("a", ()), Arm("a", ("--io-workers", "2")))}, "every name once"),
        ({"arms": (Arm("a", ("--no-such",)),)}, "known flag"),
        ({"against": "x"}, "--against"),
        ({"peers": (PeerCommand("p", ("/bin/true",)),)}, "llama-bench"),
    ],
)
def test_comparisons_that_cannot_be_made(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        participants(BenchCommand(Path("m"), **settings))


def record(arm: str, n_round: int, rate: float, *, error: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {
        "arm": arm, "round": n_round, "wall_s": 1.0, "others_cores": 0.5,
        "memory": {
            "peak_bytes": 300 << 20, "limit_hits": 4, "oom_kills": 0,
            "file_cache_bytes": 200 << 20,
        },
        "cache": "dropped", "cached_before": 0, "cached_after": 200 << 20, "report": {},
        "bytes": {"per_token": 2_000_000 if arm == "a" else 1_000_000},
    }  # fmt: skip
    if error:
        return found | {"error": error}
    return found | {"tok_s": rate, "prompt_tok_s": None, "tokens": [1, 2] if arm == "a" else []}


def test_the_table() -> None:
    rates = {"a": (10.0, 5.0, 20.0), "b": (12.0, 6.0, 26.0)}
    records = [record(arm, n, rates[arm][n]) for n in range(3) for arm in rates]
    head, first, second, note = table(records, ["a", "b"], "a").splitlines()
    assert head.split()[:3] == ["arm", "blocks", "tokens/s"]
    assert first.split() == ["a", "3", "10.00", "–", "–", "–", "2.0", "–", "300", "4"]
    assert second.split() == (
        ["b", "3", "12.00", "1.20", "[1.20,", "1.30]", "–", "–", "1.0", "0.50", "300", "4"]
    )
    assert note.endswith("each arm ÷ a.")


def test_a_failed_block_takes_its_pair_with_it() -> None:
    records = [record("a", 0, 10), record("b", 0, 20), record("a", 1, 10)]
    records.append(record("b", 1, 0, error="exit -9"))
    (row,) = [line for line in table(records, ["a", "b"], "a").splitlines() if line[0] == "b"]
    assert row.split()[:6] == ["b", "1", "of", "2", "20.00", "2.00"]
    assert block_line(records[-1], 4, 4) == "[4/4] b: exit -9"


def test_warnings() -> None:
    falling = [record("a", n, rate) for n, rate in enumerate((10, 10, 10, 7, 7, 7))]
    assert "a: the second half of its blocks ran -30%" in table(falling, ["a"], "a")
    other = record("c", 0, 10) | {"tokens": [3]}
    assert "round 0: arms that should draw" in table([falling[0], other], ["a"], "a")
    other["report"] = {"settings": {"numerics": "exact"}}
    assert "round 0" not in table([falling[0], other], ["a"], "a")


def test_pages_that_another_process_paid_for() -> None:
    mine = record("a", 0, 10)
    assert "warning" not in table([mine], ["a"], "a")
    for change in ({"cached_after": 230 << 20}, {"cached_before": 30 << 20}):
        assert "something else reads the file" in table([mine | change], ["a"], "a")
        assert "warning" not in table([mine | change | {"cache": "kept"}], ["a"], "a")


def test_the_real_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two arms, a round each way; the lines hold what a report needs."""
    out = tmp_path / "blocks.jsonl"
    arms = (
        Arm("worker", ("--pool", "40%", "--compute-threads", "1")),
        Arm("inline", ("--pool", "40%", "--compute-threads", "1", "--io-workers", "0")),
    )
    bench = BenchCommand(
        shipped_model(), arms, n_pairs=2, n_tokens=6, n_warm_up=2, keep_cache=True, out=out
    )
    assert run_bench(bench) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["arm"] for each in records] == ["worker", "inline", "inline", "worker"]
    for each in records:
        assert each["exit_code"] == 0
        assert each["measured_tokens"] == 6
        assert len(each["tokens"]) == 9 and len(each["spans"]) == 8
        assert each["tok_s"] > 0 and each["prompt_tok_s"] > 0
        assert each["cache"] == "kept"
        assert each["settings"]["warm_up"] == 2
        assert each["versions"]["moe-coord"] and each["machine"]["cores"]
    assert records[0]["tokens"] == records[1]["tokens"] != records[2]["tokens"]
    assert records[2]["tokens"] == records[3]["tokens"]
    assert records[0]["prompt"] == records[1]["prompt"] != records[2]["prompt"]
    assert "inline" in capsys.readouterr().out


def test_the_command_refuses_before_it_runs_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "coordinator", "bench", str(shipped_model())]
    for arguments, code, part in (
        (["--arm", "a: --no-such"], 2, "--no-such"),
        (["--out", str(tmp_path / "no" / "such")], 2, "--out"),
        (["--peer", "p=/bin/true"], 2, "llama-bench"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert part in done.stderr and done.stderr.count("\n") == 1
