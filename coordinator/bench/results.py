"""What a comparison leaves in its folder beside the blocks: answers.json, CSV, and the report.

The answer needs no library; charts do. They are drawn by a process of its own
(`coordinator.bench.report`), so that nothing of it is in the memory of a run.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coordinator.bench.answers import Answer
from coordinator.bench.participants import Who
from coordinator.bench.records import Record, value_of
from coordinator.bench.table import cache_line
from coordinator.bench.warnings import warnings_of
from coordinator.command.signals import StopSignals
from coordinator.processes.group import ProcessTree
from coordinator.processes.program import run_watched

ANSWERS = "answers.json"
REPORT_SECONDS = 600.0
KEPT = ("settings", "machine", "disk", "file_system", "versions")
# column -> where it stands in a record
COLUMNS: dict[str, tuple[str, ...]] = {
    "round": ("round",),
    "room": ("room",),
    "arm": ("arm",),
    "kind": ("kind",),
    "started_utc": ("started_utc",),
    "tokens_per_second": ("tok_s",),
    "prompt_tokens_per_second": ("prompt_tok_s",),
    "measured_tokens": ("measured_tokens",),
    "measured_seconds": ("measured_s",),
    "bytes_per_token": ("bytes", "per_token"),
    "compute_seconds_per_token": ("report", "token_time", "compute_s"),
    "expert_seconds_per_token": ("report", "token_time", "experts_s"),
    "wait_disk_seconds_per_token": ("report", "token_time", "wait_disk_s"),
    "coordination_seconds_per_token": ("report", "token_time", "coordination_s"),
    "requests": ("report", "experts", "requests"),
    "hits": ("report", "experts", "hits"),
    "reads_in_flight": ("report", "settings", "reads_in_flight"),
    "mean_reads_in_flight": ("report", "token_time", "mean_reads_in_flight"),
    "major_faults_per_token": ("report", "faults", "major"),
    "major_faults_of_block": ("faults", "major"),
    "minor_faults_of_block": ("faults", "minor"),
    "disk_limit_bytes_per_second": ("disk_bytes_per_second",),
    "peak_bytes": ("memory", "peak_bytes"),
    "limit_hits": ("memory", "limit_hits"),
    "other_cores_busy": ("others_cores",),
    "cache": ("cache",),
    "error": ("error",),
}


def write_results(
    folder: Path,
    answer: Answer,
    records: Sequence[Record],
    who: Who,
    beside: Sequence[str],
    stop: StopSignals,
) -> None:
    """Write the files and say where they are. A report that cannot be drawn is said, not fatal."""
    found: dict[str, Any] = {
        **answer.as_json(),
        "rooms": [room.name for room in who.rooms],
        "short_rooms": {room.name: room.short for room in who.rooms},
        "arms": [each.name for each in who.participants],
        "reference": who.reference,
        "page_cache": cache_line(records),
        "warnings": [*who.sweep.notes, *warnings_of(records), *beside],
        **({key: records[-1].get(key) for key in KEPT} if records else {}),
    }
    (folder / ANSWERS).write_text(json.dumps(found, indent=1) + "\n")
    write_csv(folder / "blocks.csv", list(COLUMNS), _rows(records))
    draw_report(folder, stop)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table as CSV; None is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)


def draw_report(folder: Path, stop: StopSignals) -> None:
    """report.html and PNGs of what lies in a folder."""
    command = [sys.executable, "-P", "-m", "coordinator.bench.report", str(folder)]
    seen = run_watched(command, ProcessTree(), stop, REPORT_SECONDS)
    for _, line in seen.error_lines:
        print(line, file=sys.stderr)
    if seen.exit_code == 0:
        print(f"report: {folder / 'report.html'}", file=sys.stderr)


def _rows(records: Sequence[Record]) -> Iterator[list[Any]]:
    for record in records:
        yield [value_of(record, path) for path in COLUMNS.values()]
