"""`moe-coord bench --merge`: one answer per kind of hardware, from the blocks of several runs.

Machines with the same processor, cores, memory, disk and file system are one kind. The rounds of
their runs stand side by side where the same was compared (`comparable`). Ratios are of pairs within
one run only: machines are never compared with each other by their speed.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from coordinator.bench.answers import PATHS, Answer, Finding, answer_of, shown
from coordinator.bench.comparable import Run, check_comparable, distinct_runs
from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record, make_folder, read_blocks, value_of
from coordinator.bench.results import ANSWERS, draw_report, write_csv
from coordinator.bench.rooms import Room
from coordinator.bench.warnings import warnings_of
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import stop_signals

GiB_IN_KIB = 1 << 20
MERGED = "merged.jsonl"  # not the name of a run's own blocks, which may lie there
RATIO_COLUMNS = ("hardware", "runs", "pair", "pairs", "ratio", "low", "high")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of hardware, how many runs are of it, and what their blocks say."""

    hardware: str
    n_runs: int
    answer: Answer
    warnings: tuple[str, ...]
    records: tuple[Record, ...] = ()


def run_merge(bench: BenchCommand) -> int:
    """Read the files, print the table and the sentences; returns the exit code.

    Raises `ConfigError` for files that are no blocks, or did not compare the same.
    """
    if not bench.files:
        raise ConfigError("--merge: expected blocks.jsonl files, found none; name one or more")
    runs = []
    for path in bench.files:
        try:
            runs.append(Run(path, read_blocks(path)))
        except OSError as error:
            raise ConfigError(
                f"--merge: expected a readable file, found {str(path)!a:.200}: {error.strerror}; "
                "give another path"
            ) from error
    kinds = merged(runs)
    short = {room.name: room.short for run in runs for room in rooms_in(run.records)}
    print("\n".join(lines_of(kinds, short)))
    if bench.out is not None:
        write_merged(bench.out, kinds, short)
    return 0


def merged(runs: Sequence[Run]) -> list[Kind]:
    """The kinds in the order in which they come. Raises `ConfigError`."""
    of_kind: dict[str, list[Run]] = {}
    for run in distinct_runs([run for run in runs if run.records]):
        of_kind.setdefault(hardware_of(run.records[0]), []).append(run)
    questions = {str(record.get("question")) for run in runs for record in run.records}
    if len(questions) != 1:
        raise ConfigError(
            f"--merge: expected blocks of one question, found {len(questions)}: "
            f"{', '.join(sorted(questions))[:200]!a}; merge those of one at a time"
        )
    return [_kind(hardware, found) for hardware, found in of_kind.items()]


def hardware_of(record: Record) -> str:
    """Processor, cores, memory, disk and file system in one line."""
    machine = record["machine"]
    parts = [
        str(machine.get("cpu")),
        f"{machine.get('cores')} cores",
        f"{_number(machine.get('memory_kib')) / GiB_IN_KIB:.0f} GiB",
        str(value_of(record, ("disk", "model")) or value_of(record, ("disk", "name")) or "no disk"),
        str(value_of(record, ("file_system", "type")) or "unknown file system"),
    ]
    return ", ".join(parts)


def rooms_in(records: Sequence[Record]) -> list[Room]:
    """The rooms of a file, in the order in which they were tried."""
    found: dict[str, Room] = {}
    for record in records:
        name, cap = record["room"], value_of(record, ("settings", "cap_bytes"))
        found.setdefault(name, Room(name, (), cap, short=str(record.get("room_short", name))))
    return list(found.values())


def lines_of(kinds: Sequence[Kind], short: dict[str, str]) -> list[str]:
    """A row per kind of hardware, a column per pair; then the sentences."""
    names = list(
        dict.fromkeys(column_of(found, short) for kind in kinds for found in _speeds(kind))
    )
    lines = []
    for kind in kinds:
        cells = {column_of(found, short): found for found in _speeds(kind)}
        lines.append(f"{kind.hardware} ({n_runs_text(kind.n_runs)}):")
        for name in names:
            ratio = cells[name].ratio if name in cells else None
            lines.append(f"  {name}: {shown(ratio) if ratio is not None else 'not measured'}")
        lines += [f"  warning: {line}" for line in kind.warnings]
    lines += [f"{kind.hardware}: {kind.answer.headline}" for kind in kinds]
    return lines


def n_runs_text(n_runs: int) -> str:
    """``1 run``, ``2 runs``."""
    return f"{n_runs} run{'s' if n_runs != 1 else ''}"


def column_of(found: Finding, short: dict[str, str]) -> str:
    """What a ratio is of, in few words."""
    over, under = (short.get(name, name) for name in (found.room, found.reference_room))
    where = f", {over}" if over else ""
    if found.room != found.reference_room:
        return f"{found.arm}{where} ÷ {under}"
    return f"{found.arm} ÷ {found.reference}{where}"


def write_merged(folder: Path, kinds: Sequence[Kind], short: dict[str, str]) -> None:
    """answers.json, the blocks side by side, CSV and the report."""
    make_folder(folder)
    found: dict[str, Any] = {
        "question": kinds[0].answer.question,
        "short_rooms": short,
        "kinds": [
            {
                "hardware": kind.hardware,
                "runs": kind.n_runs,
                "warnings": list(kind.warnings),
                **kind.answer.as_json(),
            }
            for kind in kinds
        ],
    }
    (folder / ANSWERS).write_text(json.dumps(found, indent=1) + "\n")
    with (folder / MERGED).open("w", encoding="utf-8") as file:
        for kind in kinds:
            file.writelines(json.dumps(each) + "\n" for each in kind.records)
    rows = [
        (kind.hardware, kind.n_runs, column_of(each, short), *astuple(each.ratio))
        for kind in kinds
        for each in _speeds(kind)
        if each.ratio is not None
    ]
    write_csv(folder / "ratios.csv", RATIO_COLUMNS, rows)
    with stop_signals() as stop:
        draw_report(folder, stop)


def _kind(hardware: str, runs: Sequence[Run]) -> Kind:
    """Rounds of each run behind those of the one before. Raises `ConfigError`."""
    check_comparable(runs)
    records: list[Record] = []
    for run in runs:
        start = 1 + max((record["round"] for record in records), default=-1)
        records += [{**record, "round": record["round"] + start} for record in run.records]
    rooms = {room.name: room for room in rooms_in(records)}
    sweep = Sweep(str(records[0].get("question")), (), _pairs(runs, rooms))
    n_bytes = min(value_of(record, ("settings", "expert_bytes")) or 0 for record in records)
    answer = answer_of(records, sweep, list(rooms.values()), n_bytes)
    return Kind(hardware, len(runs), answer, tuple(warnings_of(records)), tuple(records))


def _pairs(runs: Sequence[Run], rooms: dict[str, Room]) -> tuple[Pair, ...]:
    """Those of all runs, each once. Raises `ConfigError` for lines that tell none."""
    pairs: dict[tuple[Any, ...], Pair] = {}
    for run in runs:
        for record in run.records:
            try:
                for found in record["pairs"]:
                    pair = _pair(found, rooms)
                    # not the words, which another version may put otherwise
                    pairs.setdefault((pair.arm, pair.reference, pair.rooms, pair.what), pair)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"--merge: expected blocks that name their pairs, found others in "
                    f"{str(run.path)!a:.200}; they are of another version: measure again"
                ) from error
    return tuple(pairs.values())


def _pair(found: dict[str, Any], rooms: dict[str, Room]) -> Pair:
    """A room of a run that ended before it came to it has a name and no blocks. Raises `KeyError`,
    `TypeError` or `ValueError` for what is no pair."""
    texts = [found[name] for name in ("subject", "than", "arm", "reference", "what")]
    if not all(isinstance(text, str) for text in texts) or found["what"] not in PATHS:
        raise ValueError("not a pair")
    names = found["rooms"]
    over_under = None
    if names is not None:
        over, under = (rooms.get(name, Room(name, short=name)) for name in names)
        over_under = (over, under)
    return Pair(
        found["subject"], found["than"], found["arm"], found["reference"], over_under,
        found["what"],
    )  # fmt: skip


def _speeds(kind: Kind) -> list[Finding]:
    return [
        found for claim in kind.answer.claims for found in claim.findings if found.what == "speed"
    ]


def _number(found: Any) -> float:
    return found if isinstance(found, int | float) else 0
