"""Blocks of several machines: one row per kind of hardware, pairs within a machine only."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_blocks import ROOM, blocks

from coordinator.bench.merge import hardware_of, lines_of, merged, run_merge
from coordinator.bench.questions import Pair, pair_record
from coordinator.bench.records import Record
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError

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


def test_one_kind_is_one_row_and_machines_are_not_compared() -> None:
    """A machine ten times as fast changes no ratio."""
    files = [machine(10, 1.3, 4, 2, 1), machine(100, 1.3, 4, 2, 2), machine(10, 0.7, 8, 4, 3)]
    two, four = merged(files)
    assert (two.n_machines, four.n_machines) == (2, 1)
    ratio = two.answer.claims[0].findings[0].ratio
    assert ratio is not None and ratio.n_pairs == 8 and 1.2 < ratio.median < 1.4
    assert [kind.answer.claims[0].findings[0].verdict for kind in (two, four)] == ["more", "less"]
    assert hardware_of(files[0][0]) == "c, 2 cores, 8 GiB, d, ext4"
    lines = lines_of([two, four], {ROOM: ""})
    assert lines[0] == "c, 2 cores, 8 GiB, d, ext4 (2 machine(s)):"
    assert lines[1].startswith("  b ÷ a: 1.")
    assert "as fast as inline" in lines[-1]


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    other = [{**record, "question": "reader"} for record in machine(10, 1, 1, 2, 1)]
    with pytest.raises(ConfigError, match="one question, found 2"):
        merged([machine(10, 1, 1, 2, 1), other])
    without = [{k: v for k, v in record.items() if k != "pairs"} for record in other]
    with pytest.raises(ConfigError, match="of another version"):
        merged([without])
    with pytest.raises(ConfigError, match="found none"):
        run_merge(BenchCommand(merge=True))
    with pytest.raises(ConfigError, match="readable file"):
        run_merge(BenchCommand((tmp_path / "no",), merge=True))
    with pytest.raises(ConfigError, match="found 0"):
        merged([[]])


def test_files_in_report_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, cores in enumerate((2, 4)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in machine(10, 1.3, 6, cores, number)))
        paths.append(path)
    pytest.importorskip("vl_convert", reason="needs the extra: pip install 'moe-coord[report]'")
    out = tmp_path / "out"
    assert run_merge(BenchCommand(tuple(paths), merge=True, out=out)) == 0
    assert capsys.readouterr().out.count("machine(s)") == 2
    assert len(json.loads((out / "answers.json").read_text())["kinds"]) == 2
    assert "Paired ratios by kind of hardware" in (out / "report.html").read_text()
