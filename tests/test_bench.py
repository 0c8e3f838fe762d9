"""The comparison as a whole: prompts, participants, table, and runs of the real program."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench.bench import prompt_of_round, run_bench
from coordinator.bench.disk import disk_of
from coordinator.bench.line import common_of, comparison_of
from coordinator.bench.models import measured_model, models_of_arms
from coordinator.bench.participants import Who, who_of
from coordinator.bench.peer import with_threads
from coordinator.bench.records import Record, read_blocks
from coordinator.bench.report.routing import routing_charts
from coordinator.bench.statistics import MIN_PAIRS
from coordinator.bench.table import block_line, cache_line, table
from coordinator.bench.trace import TRACES
from coordinator.bench.warnings import warnings_of
from coordinator.command.bench_commands import ARM, PEER, POOLS, Arm, BenchCommand, PeerCommand
from coordinator.command.config import Config, shipped_model
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse
from coordinator.core.policy_choice import POLICIES
from coordinator.processes.limits import ResourceError
from coordinator.routing.trace_file import read_trace

MODEL = shipped_model()


def who(bench: BenchCommand) -> Who:
    return who_of(bench, [measured_model(MODEL)], {})


def test_prompts_rotate_and_come_again() -> None:
    bench = BenchCommand((MODEL,), n_prompt=64)
    prompts = [prompt_of_round(bench, number, 1000) for number in range(3)]
    assert all(len(prompt) == 64 and max(prompt) < 1000 for prompt in prompts)
    assert prompts[0] != prompts[1] != prompts[2]
    assert prompts == [prompt_of_round(bench, number, 1000) for number in range(3)]
    assert prompt_of_round(BenchCommand((MODEL,), n_prompt=64, seed=2), 0, 1000) != prompts[0]


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


def test_a_peer_gets_our_threads_unless_it_has_its_own() -> None:
    for command in (("b", "-t", "1"), ("b", "--threads", "3")):
        assert with_threads(PeerCommand("p", command), 2).command == command
    assert with_threads(PeerCommand("p", ("b",)), 2).command == ("b", "-t", "2")


def test_a_model_that_an_arm_names_is_treated_as_the_first(tmp_path: Path) -> None:
    """Dropped, looked at, copied and told of; MODEL under another path is no other file."""
    other, link = tmp_path / "other.gguf", tmp_path / "link.gguf"
    other.write_bytes(MODEL.read_bytes())
    link.symlink_to(MODEL)
    arms = (
        Arm("plain", ()), Arm("other", ("-m", str(other))), Arm("again", (f"--model={other}",)),
        Arm("link", ("-m", str(link))),
    )  # fmt: skip
    bench = BenchCommand((MODEL,), arms=arms)
    assert models_of_arms(bench) == (other,)
    models = [measured_model(path) for path in (MODEL, other)]
    (tmp_path / "copy").mkdir()
    copied = {path: tmp_path / "copy" / path.name for path in (MODEL, other)}
    for path in copied.values():
        path.touch()
    for copies in ({}, copied):
        found = who_of(bench, models, copies)
        assert found.files_of(models) == (
            copies.get(MODEL, MODEL).with_name(MODEL.name), copies.get(other, other)
        )  # fmt: skip
        run = [
            each.command(found.rooms[0], [1], 1)[4:] for each in found.participants
        ]  # behind python -P -m coordinator
        configs = [parse(flags) for flags in run]
        assert [config.model for config in configs if isinstance(config, Config)] == [
            copies.get(MODEL, MODEL), copies.get(other, other), copies.get(other, other),
            copies.get(MODEL, link),
        ]  # fmt: skip
        line = common_of(bench, found, models, None, comparison_of(bench, found, models))
        assert len(line["settings"]["fingerprints"]) == 2
    with pytest.raises(ConfigError, match="--arm 'named': expected a model that is on this"):
        models_of_arms(BenchCommand((MODEL,), arms=(Arm("named", ("-m", "ollama:no-such:1b")),)))


def test_the_disk_of_a_copy_is_the_one_that_counts(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or disk_of(memory) is not None or disk_of(MODEL) is None:
        pytest.skip("needs a model on a disk, and a file system without one")
    model = measured_model(MODEL)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        copy = Path(folder) / MODEL.name
        copy.touch()
        bench = BenchCommand((MODEL,))
        found = who_of(bench, [model], {MODEL: copy})
        assert common_of(bench, found, [model], None, "c")["file_system"]["type"] == "tmpfs"
        other = Path(folder) / "other.gguf"
        other.write_bytes(MODEL.read_bytes())
        bench = BenchCommand(
            (MODEL,), arms=(Arm("other", ("-m", str(other))),), disk_bytes_per_second=10**8,
            copy="never", out=tmp_path,
        )  # fmt: skip
        with pytest.raises(ResourceError, match="all models on one disk"):
            run_bench(bench)


BENCH_PEER = PeerCommand("p", ("llama-bench",))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "moe-coord"),
        ({"arms": (Arm("a", ()), Arm("b", ()))}, "a"),
        ({"arms": (Arm("a", ()),), "peers": (BENCH_PEER,)}, "p"),
        ({"arms": (Arm("a", ()),), "peers": (BENCH_PEER,), "against": "a"}, "a"),
    ],
)
def test_what_the_others_are_divided_by(
    settings: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama-bench").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    bench = BenchCommand((MODEL,), **settings)
    found = who(bench)
    assert found.reference == expected
    assert expected in {each.name for each in found.participants}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"arms": (Arm("a", ()), Arm("a", ("--io-workers", "2")))}, "every name once"),
        ({"arms": (Arm("a", ("--no-such",)),)}, "known flag"),
        ({"against": "x"}, "--against"),
        ({"peers": (PeerCommand("p", ("/bin/true",)),)}, "llama-bench"),
        ({"pools": POOLS.parse("20%")}, "with --question"),
        ({"question": "memory", "arms": (Arm("a", ()),)}, "found both"),
        ({"question": "quant"}, "expected two files"),
        ({"question": "memory", "pools": POOLS.parse("900T")}, "smaller --pool"),
    ],
)
def test_comparisons_that_cannot_be_made(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        who(BenchCommand((MODEL,), **settings))


def record(arm: str, n_round: int, rate: float, *, error: str = "") -> Record:
    found: Record = {
        "room": "the whole machine", "arm": arm,
        "round": n_round, "wall_s": 1.0, "others_cores": 0.5,
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
    rates = {"a": (10.0, 5.0, 20.0, 10.0, 10.0), "b": (12.0, 6.0, 26.0, 12.0, 12.0)}
    records = [record(arm, n, rates[arm][n]) for n in range(MIN_PAIRS) for arm in rates]
    head, first, second, note = table(records, ["a", "b"], "a").splitlines()
    assert head.split()[:3] == ["arm", "blocks", "tokens/s"]
    assert first.split() == ["a", "5", "10.00", "–", "–", "–", "2.0", "–", "300", "4"]
    assert second.split() == (
        ["b", "5", "12.00", "1.20", "[1.20,", "1.30]", "–", "–", "1.0", "0.50", "300", "4"]
    )
    assert note.endswith("each arm ÷ a.")


def test_what_was_done_to_the_page_cache_is_said() -> None:
    records = [record("a", n, 10) | {"cache": cache} for n, cache in enumerate("xxy")]
    assert cache_line(records) == "Page cache before each block: x; y."
    assert cache_line([]) == ""


def test_a_failed_block_takes_its_pair_with_it() -> None:
    records = [record("a", 0, 10), record("b", 0, 20), record("a", 1, 10)]
    records.append(record("b", 1, 0, error="exit -9"))
    (row,) = [line for line in table(records, ["a", "b"], "a").splitlines() if line[0] == "b"]
    assert row.split()[:6] == ["b", "1", "of", "2", "20.00", "2.00"]
    assert block_line(records[-1], 4, 4) == "[4/4] b: exit -9"


def test_warnings() -> None:
    falling = [record("a", n, rate) for n, rate in enumerate((10, 10, 10, 7, 7, 7))]
    assert "a: the second half of its blocks ran -30% against the first" in warnings_of(falling)
    other = record("c", 0, 10) | {"tokens": [3]}
    both = [falling[0], other]
    assert any("round 0: arms that should draw" in line for line in warnings_of(both))
    other["report"] = {"settings": {"numerics": "exact"}}
    assert not any("round 0" in line for line in warnings_of(both))


def test_pages_that_another_process_paid_for() -> None:
    """Such blocks are told of and left out, unless the arm reads past the page cache."""
    mine, other = record("a", 0, 10), record("b", 0, 20)
    assert not [line for line in warnings_of([mine]) if "something else" in line]
    past = {"report": {"settings": {"reader": "direct", "dense": "anonymous"}}}
    mapped = {"report": {"settings": {"reader": "direct", "dense": "mapped"}}}
    kept = {"cache": "kept"}
    for change in ({"cached_after": 230 << 20}, {"cached_before": 30 << 20}):
        for more, is_told in (
            ({}, True),
            (mapped, True),
            (past, False),
            (kept, False),
        ):
            found = mine | change | more
            told = [line for line in warnings_of([found]) if "something else reads" in line]
            assert bool(told) == is_told
            row = table([found, other], ["a", "b"], "a").splitlines()[2].split()
            assert ("2.00" in row) == (not is_told)


def test_the_real_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two arms, a round each way; the lines hold what a report needs. Then it is continued."""
    arms = (
        Arm("worker", ("--pool", "40%", "--compute-threads", "1")),
        Arm("inline", ("--pool", "40%", "--compute-threads", "1", "--io-workers", "0")),
    )
    settings: dict[str, Any] = {
        "n_tokens": 6, "n_warm_up": 2, "keep_cache": True, "out": tmp_path, "copy": "never",
    }  # fmt: skip
    assert run_bench(BenchCommand((MODEL,), arms=arms, n_pairs=1, **settings)) == 0
    path = tmp_path / "blocks.jsonl"
    with path.open("a") as file:
        file.write('{"arm": "wor')  # a kill in the middle of a line
    assert run_bench(BenchCommand((MODEL,), arms=arms, n_pairs=2, **settings)) == 0
    records = read_blocks(path)
    assert [each["arm"] for each in records] == ["worker", "inline", "inline", "worker"]
    for each in records:
        assert each["exit_code"] == 0
        assert each["measured_tokens"] == 6
        assert len(each["tokens"]) == 9 and len(each["spans"]) == 8
        assert each["tok_s"] > 0 and each["prompt_tok_s"] > 0
        assert each["cache"] == "kept"
        assert each["settings"]["warm_up"] == 2
        assert each["versions"]["moe-coord"] and each["machine"]["cores"]
        assert each["file_system"]["type"]
        assert {"hottest_c", "on_mains", "battery_percent", "governor"} <= each["before"].keys()
        assert each["report"]["faults"]["minor"] >= 0
        assert each["report"]["token_time"]["compute_s"] > 0
    assert records[0]["tokens"] == records[1]["tokens"] != records[2]["tokens"]
    assert records[2]["tokens"] == records[3]["tokens"]
    assert records[0]["prompt"] == records[1]["prompt"] != records[2]["prompt"]
    said = capsys.readouterr()
    assert "going on behind 2 blocks" in said.err
    assert "Page cache before each block: kept." in said.out
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers["claims"][0]["findings"][0]["verdict"] == "few"
    assert answers["page_cache"] == "Page cache before each block: kept."
    assert (tmp_path / "blocks.csv").read_text().count("\n") == 5
    with pytest.raises(ConfigError, match="same comparison"):
        run_bench(BenchCommand((MODEL,), arms=arms[:1], n_pairs=2, **settings))
    with pytest.raises(ConfigError, match="same comparison"):
        run_bench(BenchCommand((MODEL,), question="memory", n_pairs=2, **settings))
    assert not list(tmp_path.glob("trace-*"))  # nothing was run before


def test_an_interrupted_comparison_says_how_it_goes_on(tmp_path: Path) -> None:
    command = [
        sys.executable, "-P", "-m", "coordinator", "bench", str(MODEL),
        "--arm", "a: --compute-threads 1", "--pairs", "1000", "-n", "4", "--warm-up", "1",
        "--keep-cache", "--out", str(tmp_path),
    ]  # fmt: skip
    said = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        for line in program.stderr:
            said.append(line)
            if line.startswith("[1/1000]"):
                program.send_signal(signal.SIGINT)
    assert program.returncode == 130
    n_blocks = len(read_blocks(tmp_path / "blocks.jsonl"))
    assert said[-1] == (
        f"interrupted: {n_blocks} whole rounds are in {tmp_path / 'blocks.jsonl'}; the same "
        "command goes on behind them\n"
    )


def test_too_little_time_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = BenchCommand((MODEL,), question="workers", minutes=0.001, out=tmp_path, copy="never")
    assert run_bench(bench) == 0
    assert "of 0.001 minutes gave no whole pair: give more --minutes." in capsys.readouterr().out
    assert read_blocks(tmp_path / "blocks.jsonl") == []


def test_the_command_refuses_before_it_runs_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "coordinator", "bench"]
    (tmp_path / "file").touch()
    for arguments, code, part in (
        ([str(MODEL), "--arm", "a: --no-such"], 2, "--no-such"),
        ([str(MODEL), "--out", str(tmp_path / "file" / "such")], 2, "--out"),
        ([str(MODEL), "--peer", "p=/bin/true"], 2, "llama-bench"),
        ([str(MODEL), "--peer", "p=/no/llama-bench"], 2, "none as '/no/llama-bench'"),
        ([str(MODEL), "--question", "no"], 2, "io-process"),
        ([str(MODEL), "--synth"], 2, "--synth"),
        ([], 2, "MODEL: expected a GGUF file"),
        (["--synth"], 2, "--out DIR"),
        ([str(MODEL), str(MODEL)], 2, "expected 1 file,"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert part in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("gone", ["stdout", "stderr"])
def test_who_reads_it_may_go(gone: str, tmp_path: Path) -> None:
    """What is measured is kept, all of it."""
    read, write = os.pipe()
    os.close(read)
    flags = ["--pairs", "2", "-n", "2", "--warm-up", "0", "--keep-cache", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-u", "-P", "-m", "coordinator", "bench", str(MODEL), *flags],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, gone: write},
        check=False,
    )  # type: ignore[call-overload]
    os.close(write)
    assert done.returncode == 0
    assert len(read_blocks(tmp_path / "blocks.jsonl")) == 2
    assert (tmp_path / "answers.json").exists()


def test_a_model_too_small_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preset runs to its end, within its time, and claims nothing."""
    bench = BenchCommand(
        (MODEL,), question="memory", minutes=5.0, n_pairs=1, n_tokens=4, n_warm_up=1,
        keep_cache=True, out=tmp_path, pools=POOLS.parse("30%,60%"), compute_threads=1,
    )  # fmt: skip
    assert run_bench(bench) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith("too small to answer: the experts take 15 MiB")
    assert "of 5 minutes gave" in said.out
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers["too_small"] and answers["headline"].startswith("too small")
    for name in TRACES:
        assert read_trace(tmp_path / name).n_steps == 1 + 4 + 1  # prompt and warm-up, then tokens
    charts = routing_charts(tmp_path)
    assert [chart.name for chart in charts] == ["hit_rates", "expert_use"]
    assert "static and imatrix begin with the counts of another prompt" in charts[0].about
    hits: dict[str, dict[float, float]] = {}
    for row in charts[0].spec["data"]["values"]:
        hits.setdefault(row["policy"], {})[row["percent"]] = row["hits"]
    assert {*POLICIES, "belady", "page cache"} == set(hits)
    for policy in POLICIES:
        assert all(hits["belady"][size] >= rate for size, rate in hits[policy].items())
    assert len(charts[1].spec["data"]["values"]) == 8 * 16
