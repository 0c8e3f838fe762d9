"""Lines of blocks: whole or not there, of one comparison, and what counts of them."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from bench_blocks import block

from coordinator.bench.records import (
    by_round,
    has_failed,
    is_foreign,
    open_blocks,
    read_blocks,
    value_of,
)
from coordinator.command.flag_values import ConfigError

COMMON = {
    key: block("a", 0, 1)[key]
    for key in ("comparison", "machine", "disk", "file_system", "versions")
}


def test_a_part_of_a_line_is_cut_off_and_the_rest_is_done(tmp_path: Path) -> None:
    with_one = open_blocks(tmp_path / "new" / "folder", COMMON)
    with_one.add(block("a", 0, 10))
    with_one.close()
    path = tmp_path / "new" / "folder" / "blocks.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    again = open_blocks(path.parent, COMMON)
    assert [record["arm"] for record in again.done] == ["a"]
    again.close()
    assert path.read_text() == whole


def test_two_at_once_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first = open_blocks(tmp_path, COMMON)
    line = json.dumps(block("a", 0, 10))
    (tmp_path / "blocks.jsonl").write_text(line[:100])  # it is just being written
    with pytest.raises(ConfigError, match="--out: expected a folder that nobody else writes to"):
        open_blocks(tmp_path, COMMON)
    assert (tmp_path / "blocks.jsonl").read_text() == line[:100]
    first.close()
    open_blocks(tmp_path, COMMON).close()


def test_a_path_that_is_no_text_is_kept(tmp_path: Path) -> None:
    path = os.fsdecode(b"/models/\xff.gguf")
    with contextlib.closing(open_blocks(tmp_path, COMMON)) as blocks:
        blocks.add(block("a", 0, 10) | {"command": ["moe-coord", "--model", path]})
    (found,) = read_blocks(tmp_path / "blocks.jsonl")
    assert found["command"][-1] == path


@pytest.mark.parametrize(
    "text", ["[1]\n", "x\n", '{"arm": 1}\n', "[" * 100_000 + "\n", '"' + "a" * 10 + '"\n']
)
def test_files_that_hold_no_blocks(tmp_path: Path, text: str) -> None:
    (tmp_path / "blocks.jsonl").write_text(text)
    for read in (
        lambda: read_blocks(tmp_path / "blocks.jsonl"),
        lambda: open_blocks(tmp_path, COMMON),
    ):
        with pytest.raises(ConfigError, match="something else in line 1"):
            read()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"machine": 1}, 'a "machine" that is not an object in line 2'),
        ({"settings": None}, 'a "settings" that is not an object in line 2'),
        ({"round": "1"}, 'a "round" that is not a count in line 2'),
        ({"round": True}, 'a "round" that is not a count in line 2'),
        ({"round": 1.0}, 'a "round" that is not a count in line 2'),
        ({"round": -1}, 'a "round" that is not between 0 and'),
        ({"round": 10**12}, 'a "round" that is not between 0 and'),
        ({"arm": []}, 'a "arm" that is not a text in line 2'),
        ({"run": "1"}, 'a "run" that is not a count in line 2'),
        ({"run": None}, 'a "run" that is not a count in line 2'),
        ({"disk": 1}, 'a "disk" that is not an object in line 2'),
        ({"tok_s": "fast"}, 'a "tok_s" that is not a number in line 2'),
        ({"tok_s": float("nan")}, 'a "tok_s" that is not a number in line 2'),
        ({"tokens": True}, 'a "tokens" that is not a list of token ids in line 2'),
        ({"spans": [[1]]}, 'a "spans" that is not a list of pairs of numbers in line 2'),
        ({"before": {"on_mains": {}}}, 'a "before.on_mains" that is not true or false in line 2'),
        (
            {"report": {"token_time": {"wait_disk_s": []}}},
            'a "report.token_time.wait_disk_s" that is not a number in line 2',
        ),
    ],
)
def test_fields_that_no_block_has(tmp_path: Path, change: dict[str, object], part: str) -> None:
    path = tmp_path / "blocks.jsonl"
    lines = [json.dumps(block("a", 0, 10)), json.dumps(block("b", 0, 10) | change)]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as refusal:
        read_blocks(path)
    assert part in str(refusal.value) and str(path) in str(refusal.value)


def test_another_comparison_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "blocks.jsonl").write_text(json.dumps(block("a", 0, 10)) + "\n")
    with pytest.raises(ConfigError, match="one of the same comparison"):
        open_blocks(tmp_path, COMMON | {"comparison": "another"})


@pytest.mark.parametrize(
    ("part", "change", "is_refused"),
    [
        ("machine", {"cores": 4}, True),
        ("machine", {"memory_kib": 4 << 20}, True),
        ("machine", {"memory_kib": (8 << 20) + 4000}, False),  # another boot
        ("machine", {"later": 1}, False),  # an older version did not write it
        ("machine", {"cpu": None}, False),  # this one does not know
        ("disk", {"name": "sda"}, True),
        ("file_system", {"type": "xfs"}, True),
        ("versions", {"moe-coord": "1"}, True),
        ("versions", {}, False),
    ],
)
def test_another_machine_is_not_mixed_in(
    tmp_path: Path, part: str, change: dict[str, object], is_refused: bool
) -> None:
    (tmp_path / "blocks.jsonl").write_text(json.dumps(block("a", 0, 10)) + "\n")
    here = COMMON | {part: COMMON[part] | change}
    if not is_refused:
        open_blocks(tmp_path, here).close()
        return
    with pytest.raises(ConfigError, match=f"found blocks with {part} {next(iter(change))} "):
        open_blocks(tmp_path, here)


def test_of_a_round_the_last_start_counts(tmp_path: Path) -> None:
    """Interrupted in round 1, then again in the midst of the same round."""
    lines = [block("a", 0, 1), block("b", 0, 1), block("a", 1, 1), block("b", 1, 1, "other")]
    lines.append(block("b", 1, 2, run=1))
    (tmp_path / "blocks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [(r["round"], r["arm"], r["tok_s"]) for r in read_blocks(tmp_path / "blocks.jsonl")] == [
        (0, "a", 1), (0, "b", 1), (1, "b", 2),
    ]  # fmt: skip


def test_values_by_round() -> None:
    records = [block("a", 0, 10), block("a", 2, 30), block("b", 1, 5), block("a", 3, 40)]
    records[-1]["error"] = "exit -9"
    assert by_round(records, "a", ("tok_s",)) == [10, None, 30, None]
    assert by_round([], "a", ("tok_s",)) == []
    assert value_of(records[0], ("report", "experts", "hits")) == 40
    assert value_of(records[0], ("report", "no", "such")) is None


def test_what_is_measured_again() -> None:
    failed = block("a", 0, 10) | {"error": "exit 5"}
    assert has_failed(failed) and not has_failed(block("a", 0, 10))
    assert not has_failed(failed | {"memory": {"oom_kills": 1}})  # it would be killed again
    assert has_failed(failed | {"memory": {"oom_kills": None}})


def test_who_reads_past_the_page_cache_has_no_help_from_it() -> None:
    held = {"cached_before": 1 << 30}
    assert not is_foreign(block("a", 0, 10, **held))
    buffered = {"settings": {"reader": "buffered", "dense": "anonymous"}}
    assert is_foreign(block("a", 0, 10, **held, report=buffered))
    assert is_foreign(block("peer", 0, 10, **held, report={}))


def test_help_is_seen_without_a_control_group() -> None:
    """There all that is cached afterwards may be the block's own; what was before is not."""
    usual = {"report": {}, "memory": {"file_cache_bytes": None}, "cached_after": 1 << 30}
    assert is_foreign(block("a", 0, 10, cached_before=1 << 30, **usual))
    assert not is_foreign(block("a", 0, 10, cached_before=0, **usual))
    assert not is_foreign(block("a", 0, 10, cached_before=1 << 30, cache="kept", **usual))
