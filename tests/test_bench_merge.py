"""Blocks of several machines: one row per kind of hardware, pairs within a machine only."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from bench_blocks import ROOM, blocks

from coordinator.bench.comparable import Run
from coordinator.bench.merge import Kind, hardware_of, lines_of, merged, run_merge
from coordinator.bench.questions import Pair, pair_record
from coordinator.bench.records import Record, read_blocks
from coordinator.bench.rooms import Room
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError

RESULTS = Path(__file__).parent / "results" / "2-cores"
PAIR = pair_record(Pair("a process", "inline", "b", "a"))


def machine(speed: float, ratio: float, n_rounds: int, cores: int, seed: int) -> list[Record]:
    common: dict[str, Any] = {
        "pairs": [PAIR],
        "room_short": "",
        "machine": {"cpu": "c", "cores": cores, "memory_kib": 8 << 20},
    }
    return [
        {**record, **common} for record in blocks({"a": speed, "b": ratio * speed}, n_rounds, seed)
    ]


def of_files(*files: list[Record]) -> list[Kind]:
    return merged([Run(Path(f"{number}.jsonl"), each) for number, each in enumerate(files)])


def changed(records: list[Record], **settings: Any) -> list[Record]:
    return [{**record, "settings": {**record["settings"], **settings}} for record in records]


def n_pairs(kind: Kind) -> int:
    ratio = kind.answer.claims[0].findings[0].ratio
    return ratio.n_pairs if ratio is not None else 0


def test_one_kind_is_one_row_and_machines_are_not_compared() -> None:
    """A machine ten times as fast changes no ratio."""
    files = [machine(10, 1.3, 4, 2, 1), machine(100, 1.3, 4, 2, 2), machine(10, 0.7, 8, 4, 3)]
    two, four = of_files(*files)
    assert (two.n_runs, four.n_runs) == (2, 1)
    ratio = two.answer.claims[0].findings[0].ratio
    assert ratio is not None and ratio.n_pairs == 8 and 1.2 < ratio.median < 1.4
    assert [kind.answer.claims[0].findings[0].verdict for kind in (two, four)] == ["more", "less"]
    assert hardware_of(files[0][0]) == "c, 2 cores, 8 GiB, d, ext4"
    lines = lines_of([two, four], {ROOM: ""})
    assert lines[0] == "c, 2 cores, 8 GiB, d, ext4 (2 runs):"
    assert lines[1].startswith("  b ÷ a: 1.")
    assert "as fast as inline" in lines[-1]


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    other = [{**record, "question": "reader"} for record in machine(10, 1, 1, 2, 1)]
    with pytest.raises(ConfigError, match="one question, found 2"):
        of_files(machine(10, 1, 1, 2, 1), other)
    without = [{k: v for k, v in record.items() if k != "pairs"} for record in other]
    strange = [{**record, "pairs": [{**PAIR, "what": "colour"}]} for record in other]
    for records in (without, strange):
        with pytest.raises(ConfigError, match="of another version"):
            of_files(records)
    with pytest.raises(ConfigError, match="found none"):
        run_merge(BenchCommand(merge=True))
    with pytest.raises(ConfigError, match="readable file"):
        run_merge(BenchCommand((tmp_path / "no",), merge=True))
    with pytest.raises(ConfigError, match="found 0"):
        of_files([])


def test_a_run_that_is_given_twice_counts_once() -> None:
    """Also as the file that it was when it was interrupted, whichever comes first."""
    run, other = machine(10, 1.3, 6, 2, 1), machine(10, 1.3, 4, 2, 2)
    for files in ((run, run), (run, run[:5]), (run[:5], run), (run[:3], run[:5], run)):
        (kind,) = of_files(*files)
        assert (kind.n_runs, n_pairs(kind)) == (1, 6)
    (kind,) = of_files(run + run, other)
    assert (kind.n_runs, n_pairs(kind)) == (2, 10)


COMMAND = ["/x/python", "-P", "-m", "coordinator", "--model", "/x/m.gguf", "--io-workers", "1"]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"fingerprints": ["b"]}, "the same fingerprints"),
        ({"disk_bytes_per_second": 1}, "the same disk bytes per second"),
        ({"tokens": 12}, "the same tokens"),
        ({"compute_threads": 1}, "the same compute threads"),
        ({"cap_bytes": 1}, "the same cap bytes of room"),
        ({"keep_cache": True}, "the same keep cache"),
    ],
)
def test_runs_that_did_not_compare_the_same(settings: dict[str, Any], part: str) -> None:
    usual = {
        "fingerprints": ["a"], "disk_bytes_per_second": None, "tokens": 24, "compute_threads": 2,
        "cap_bytes": None, "keep_cache": False,
    }  # fmt: skip
    first = changed(machine(10, 1, 2, 2, 1), **usual)
    second = changed(machine(10, 1, 2, 2, 2), **usual | settings)
    with pytest.raises(ConfigError, match=part) as refusal:
        of_files(first, second)
    assert "'0.jsonl'" in str(refusal.value) and "'1.jsonl'" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    elsewhere = [{**r, "machine": {**r["machine"], "cores": 4}} for r in second]
    assert len(of_files(first, elsewhere)) == 2  # kinds do not meet
    of_files(first, changed(machine(10, 1, 2, 2, 3), expert_bytes=1))  # an older version's


def test_flags_of_an_arm_are_the_same_in_all_runs() -> None:
    def with_command(seed: int, *command: str) -> list[Record]:
        return [{**r, "command": list(command)} for r in machine(10, 1, 2, 2, seed)]

    first = with_command(1, *COMMAND, "--tokens", "1,2", "--seed", "1")
    moved = [word.replace("/x/", "/y/z/") for word in COMMAND]
    (kind,) = of_files(first, with_command(2, *moved, "--tokens", "3,4", "--seed", "2"))
    assert n_pairs(kind) == 4
    with pytest.raises(ConfigError, match=r"flags of arm 'a'.*io-workers.*'1\.jsonl'"):
        of_files(first, with_command(2, *COMMAND[:-1], "2", "--tokens", "1,2", "--seed", "1"))


def test_arms_of_every_file_are_told() -> None:
    more = pair_record(Pair("threads", "inline", "c", "a"))
    wide = [{**r, "pairs": [PAIR, more]} for r in machine(10, 1, 3, 2, 2)]
    wide += [{**r, "arm": "c"} for r in wide if r["arm"] == "b"]
    for files in ((machine(10, 1, 2, 2, 1), wide), (wide, machine(10, 1, 2, 2, 1))):
        (kind,) = of_files(*files)
        assert [claim.findings[0].arm for claim in kind.answer.claims] == ["b", "c"]
        assert n_pairs(kind) == 5


def test_a_run_that_ended_before_its_second_room(tmp_path: Path) -> None:
    rooms = (Room("large", short="L"), Room(ROOM))
    sizes = pair_record(Pair("a large room", "a small one", "a", "a", rooms))
    records = [{**r, "pairs": [sizes]} for r in machine(10, 1, 1, 2, 1)]
    (kind,) = of_files(records)
    assert kind.answer.headline.endswith(
        "nothing was measured of a large room against a small one."
    )
    assert lines_of([kind], {ROOM: ""})[1] == "  a, large ÷ : not measured"


def test_the_runs_of_the_readme_are_merged(capsys: pytest.CaptureFixture[str]) -> None:
    """Six rounds and eight, of a version that wrote less into its lines."""
    paths = tuple(RESULTS / f"io-process-{number}.jsonl" for number in (4, 5))
    assert run_merge(BenchCommand((*paths, paths[0]), merge=True)) == 0
    said = capsys.readouterr().out
    assert "(2 runs):" in said and "process ÷ single-process, 1.46 GiB: 0.89 × [" in said
    for path in RESULTS.glob("*.jsonl"):
        assert run_merge(BenchCommand((path,), merge=True)) == 0


def test_files_in_report_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, cores in enumerate((2, 4)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in machine(10, 1.3, 6, cores, number)))
        paths.append(path)
    pytest.importorskip("vl_convert", reason="needs the extra: pip install 'moe-coord[report]'")
    out = tmp_path / "out"
    assert run_merge(BenchCommand(tuple(paths), merge=True, out=out)) == 0
    assert capsys.readouterr().out.count("(1 run):") == 2
    assert len(json.loads((out / "answers.json").read_text())["kinds"]) == 2
    with (out / "ratios.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["hardware"].split(", ")[1] for row in rows] == ["2 cores", "4 cores"]
    for row in rows:
        assert (row["runs"], row["pair"], row["pairs"]) == ("1", "b ÷ a", "6")
        assert float(row["low"]) < float(row["ratio"]) < float(row["high"])
    assert "Paired ratios by kind of hardware" in (out / "report.html").read_text()
    assert {path.name for path in out.glob("*.png")} == {"ratios.png"}


def test_of_one_kind_of_hardware_the_report_shows_what_a_run_shows(tmp_path: Path) -> None:
    """The charts of the README can be drawn again from its lines."""
    pytest.importorskip("vl_convert", reason="needs the extra: pip install 'moe-coord[report]'")
    paths = tuple(RESULTS / f"memory-{number}.jsonl" for number in (2, 3))
    assert run_merge(BenchCommand(paths, merge=True, out=tmp_path)) == 0
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    rounds = {f"rounds_{number}" for number in (1, 2, 3)}
    assert drawn == {"ratios", "memory", "token_time", "reads_in_flight", *rounds}
    assert len(read_blocks(tmp_path / "merged.jsonl")) == 72
    text = (tmp_path / "report.html").read_text()
    assert "800 MiB of memory: medians, each ÷ prefetch-off" in text
    assert "between prefetch and none" in text or "prefetch is" in text
