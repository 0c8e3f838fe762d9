"""`moe-coord bench --merge`: one answer per kind of hardware, from the blocks of several machines.

Machines with the same processor, cores, memory, disk and file system are one kind, and their rounds
stand side by side. Ratios are of pairs within one machine only: machines are never compared with
each other by their speed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.bench.answers import Answer, Finding, answer_of, shown
from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record, make_folder, read_blocks, value_of
from coordinator.bench.results import ANSWERS, draw_report
from coordinator.bench.rooms import Room
from coordinator.bench.warnings import warnings_of
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import stop_signals

GiB_IN_KIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of hardware, the machines that are of it, and what their blocks say."""

    hardware: str
    n_machines: int
    answer: Answer
    warnings: tuple[str, ...]


def run_merge(bench: BenchCommand) -> int:
    """Read the files, print the table and the sentences; returns the exit code.

    Raises `ConfigError` for files that are no blocks, or of different questions.
    """
    if not bench.files:
        raise ConfigError("--merge: expected blocks.jsonl files, found none; name one or more")
    files = []
    for path in bench.files:
        try:
            files.append(read_blocks(path))
        except OSError as error:
            raise ConfigError(
                f"--merge: expected a readable file, found {str(path)!a:.200}: {error.strerror}; "
                "give another path"
            ) from error
    kinds = merged(files)
    short = {room.name: room.short for found in files for room in rooms_in(found)}
    print("\n".join(lines_of(kinds, short)))
    if bench.out is not None:
        write_merged(bench.out, kinds, short)
    return 0


def merged(files: Sequence[Sequence[Record]]) -> list[Kind]:
    """The kinds in the order in which they come. Raises `ConfigError`."""
    of_kind: dict[str, list[Sequence[Record]]] = {}
    for records in files:
        if records:
            of_kind.setdefault(hardware_of(records[0]), []).append(records)
    questions = {records[0].get("question") for records in files if records}
    if len(questions) != 1:
        raise ConfigError(
            f"--merge: expected blocks of one question, found {len(questions)}: "
            f"{', '.join(sorted(map(str, questions)))[:200]}; merge those of one at a time"
        )
    return [_kind(hardware, machines) for hardware, machines in of_kind.items()]


def hardware_of(record: Record) -> str:
    """Processor, cores, memory, disk and file system in one line."""
    machine = record["machine"]
    parts = [
        str(machine.get("cpu")),
        f"{machine.get('cores')} cores",
        f"{(machine.get('memory_kib') or 0) / GiB_IN_KIB:.0f} GiB",
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
        lines.append(f"{kind.hardware} ({kind.n_machines} machine(s)):")
        for name in names:
            ratio = cells[name].ratio if name in cells else None
            lines.append(f"  {name}: {shown(ratio) if ratio is not None else 'not measured'}")
        lines += [f"  warning: {line}" for line in kind.warnings]
    lines += [f"{kind.hardware}: {kind.answer.headline}" for kind in kinds]
    return lines


def column_of(found: Finding, short: dict[str, str]) -> str:
    """What a ratio is of, in few words."""
    over, under = short.get(found.room, ""), short.get(found.reference_room, "")
    where = f", {over}" if over else ""
    if found.room != found.reference_room:
        return f"{found.arm}{where} ÷ {under}"
    return f"{found.arm} ÷ {found.reference}{where}"


def write_merged(folder: Path, kinds: Sequence[Kind], short: dict[str, str]) -> None:
    """answers.json and the report."""
    make_folder(folder)
    found: dict[str, Any] = {
        "question": kinds[0].answer.question,
        "short_rooms": short,
        "kinds": [
            {
                "hardware": kind.hardware,
                "machines": kind.n_machines,
                "warnings": list(kind.warnings),
                **kind.answer.as_json(),
            }
            for kind in kinds
        ],
    }
    (folder / ANSWERS).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    with stop_signals() as stop:
        draw_report(folder, stop)


def _kind(hardware: str, machines: Sequence[Sequence[Record]]) -> Kind:
    """Rounds of each machine behind those of the one before."""
    records: list[Record] = []
    for found in machines:
        start = 1 + max((record["round"] for record in records), default=-1)
        records += [{**record, "round": record["round"] + start} for record in found]
    rooms = {room.name: room for room in rooms_in(records)}
    try:
        pairs = tuple(_pair(found, rooms) for found in records[0]["pairs"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "--merge: expected blocks that name their pairs, found others; they are of another "
            "version: measure again"
        ) from error
    sweep = Sweep(str(records[0]["question"]), (), pairs)
    n_bytes = min(value_of(record, ("settings", "expert_bytes")) or 0 for record in records)
    answer = answer_of(records, sweep, list(rooms.values()), n_bytes)
    return Kind(hardware, len(machines), answer, tuple(warnings_of(records)))


def _pair(found: dict[str, Any], rooms: dict[str, Room]) -> Pair:
    names = found["rooms"]
    return Pair(
        found["subject"], found["than"], found["arm"], found["reference"],
        (rooms[names[0]], rooms[names[1]]) if names else None, found["what"],
    )  # fmt: skip


def _speeds(kind: Kind) -> list[Finding]:
    return [
        found for claim in kind.answer.claims for found in claim.findings if found.what == "speed"
    ]
