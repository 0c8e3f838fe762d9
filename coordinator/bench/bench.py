"""`moe-coord bench`: settings against each other, and against other programs, in paired blocks.

Every arm of a round gets the same random prompt and seed, every round another one. A block is one
whole process; see `block`. A `--question` brings its arms and ends with a sentence; what is
claimed, and when nothing is, stands in `answers`.
"""

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.bench.answers import Answer, answer_of, widths
from coordinator.bench.block import TIMEOUT_SECONDS, Place, run_block
from coordinator.bench.cgroup import group_name, open_group, remove_leftovers
from coordinator.bench.disk import Disk, disk_of, read_ahead
from coordinator.bench.line import common_of, comparison_of
from coordinator.bench.merge import run_merge
from coordinator.bench.models import Measured, measured_model, models_of, models_of_arms, own_files
from coordinator.bench.participants import Who, who_of
from coordinator.bench.records import (
    BLOCKS,
    BlocksFile,
    Record,
    has_failed,
    in_room,
    make_folder,
    open_blocks,
    run_of,
    together,
)
from coordinator.bench.results import write_results
from coordinator.bench.rounds import Step, TimeLimit, complete_rounds, run_rounds
from coordinator.bench.table import block_line, cache_line, table
from coordinator.bench.tokens import compared_tokens
from coordinator.bench.trace import SHARE_OF_TIME, TRACES, record_traces
from coordinator.bench.warnings import warnings_of
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.signals import StopSignals, stop_signals
from coordinator.processes.engine import EngineError
from coordinator.processes.group import Limits
from coordinator.processes.limits import ResourceError

EXIT_INTERNAL = 5
N_ROUNDS = 6  # what a claim needs, see `answers`


def run_bench(bench: BenchCommand) -> int:
    """Run all blocks and print tables and answers; returns the exit code.

    Raises `ConfigError`, `ModelFormatError`, `ModelFileError`, `ResourceError`, and `EngineError`
    for arms that fail without having been killed for their memory: at once in the first round,
    behind the results in a later one.
    """
    if bench.merge:
        return run_merge(bench)
    started = time.monotonic()
    bench = replace(bench, files=models_of(bench))
    models = [measured_model(path) for path in (*bench.files, *models_of_arms(bench))]
    limit = TimeLimit(started + 60 * bench.minutes if bench.minutes is not None else None)
    mode = "never" if bench.keep_cache else bench.copy  # what is kept may be held
    with stop_signals() as stop, own_files(models, bench.out, mode, stop) as copies:
        if stop.exit_code is not None:
            return stop.exit_code
        remove_leftovers()
        for path, copy in copies.items():
            print(f"another process holds {path} in memory: measuring on {copy}", file=sys.stderr)
        who = who_of(bench, models, copies)
        disk = disk_of(copies.get(bench.model, bench.model))
        records, beside = _records(bench, who, models, disk, limit, stop)
        if stop.received is None:
            answer = answer_of(records, who.sweep, who.rooms, models[0].expert_bytes)
            try:
                _show(bench, who, records, answer, limit, beside)
            finally:  # also where who was to read it has gone
                if bench.out is not None:
                    write_results(bench.out, answer, records, who, beside, stop)
            _check_failures(records)
        elif bench.out is not None:
            n_rounds = len(complete_rounds(records, who.rooms, who.participants))
            said = f"interrupted: {n_rounds} whole rounds are in {bench.out / BLOCKS}"
            print(f"{said}; the same command goes on behind them", file=sys.stderr)
    return stop.exit_code or 0


def prompt_of_round(bench: BenchCommand, n_round: int, vocabulary_size: int) -> list[int]:
    """Random ids: the same for all arms of a round, others in the next."""
    draw = random.Random(f"{bench.seed}/{n_round}")
    return [draw.randrange(vocabulary_size) for _ in range(bench.n_prompt)]


def _beside(
    bench: BenchCommand, who: Who, models: Sequence[Measured], limit: TimeLimit, stop: StopSignals
) -> list[str]:
    """What is no block, with a small part of the time: traces for the report, tokens of peers.

    Returns what is to be said of it.
    """
    size = models[0].spec.vocabulary_size
    prompts = [prompt_of_round(bench, n_round, size) for n_round in range(len(TRACES))]
    left = limit.left()
    seconds = TIMEOUT_SECONDS if left is None else left * SHARE_OF_TIME / len(TRACES)
    model = who.copies.get(bench.model, bench.model)
    lines = []
    if bench.out is not None and bench.question is not None:
        make_folder(bench.out)
        problem = record_traces(bench.out, model, prompts, bench.n_generated, seconds, stop)
        lines += [f"warning: {problem}"] if problem is not None else []
    threads = ("--compute-threads", str(who.n_threads))
    return lines + compared_tokens(bench.peers, model, prompts, threads, seconds, stop)


def _records(
    bench: BenchCommand,
    who: Who,
    models: Sequence[Measured],
    disk: Disk | None,
    limit: TimeLimit,
    stop: StopSignals,
) -> tuple[list[Record], list[str]]:
    """Of all blocks: those of an earlier run of the same comparison, and those run now; and what
    is said of what is no block, see `_beside`."""
    common = common_of(bench, who, models, disk, comparison_of(bench, who, models))
    size = min(model.spec.vocabulary_size for model in models)
    places = _places(bench, who, models, disk, common)
    with _blocks_file(bench.out, common) as blocks, read_ahead(disk, bench.read_ahead_kib):
        beside = _beside(bench, who, models, limit, stop)
        records = list(blocks.done) if blocks is not None else []
        done = complete_rounds(records, who.rooms, who.participants)
        n_run = 1 + max(map(run_of, records), default=-1)
        if records:
            n_done = sum(record["round"] in done for record in records)
            print(f"going on behind {n_done} blocks that are there", file=sys.stderr)
        n_rounds = bench.n_pairs or (None if bench.minutes is not None else N_ROUNDS)
        n_all = len(who.rooms) * len(who.participants) * n_rounds if n_rounds else None

        def run(step: Step, deadline: float | None) -> Record | None:
            n_round, room, each = step
            prompt = prompt_of_round(bench, n_round, size)
            return run_block(each, prompt, n_round, places[room.name], stop, deadline)

        for record in run_rounds(who.rooms, who.participants, n_rounds, done, limit, run):
            record["run"] = n_run
            records = together([*records, record])
            if blocks is not None:
                blocks.add(record)
            print(block_line(record, len(records), n_all), file=sys.stderr)
            if has_failed(record) and record["round"] == 0:
                raise EngineError(EXIT_INTERNAL, f"{record['arm']}: {record['error']}")
    return records, beside


def _places(
    bench: BenchCommand,
    who: Who,
    models: Sequence[Measured],
    disk: Disk | None,
    common: Record,
) -> dict[str, Place]:
    """By room. Raises `ResourceError` for a rate without a disk, and for limits that cannot be set:
    now, not when the first block begins."""
    if bench.disk_bytes_per_second is not None and disk is None:
        raise ResourceError(
            f"--disk-rate: expected {bench.model} on a disk, found a file system without one; "
            "use a copy on a disk"
        )
    elsewhere = [path for path in who.files_of(models) if disk_of(path) != disk]
    if bench.disk_bytes_per_second is not None and elsewhere:
        raise ResourceError(
            f"--disk-rate: expected all models on one disk, found {elsewhere[0]} on another than "
            f"{bench.model}; put them on one"
        )
    number = disk.number if disk is not None else None
    slab_bytes = models[0].spec.slabs.mean_slab_bytes
    places = {}
    for room in who.rooms:
        limits = Limits(room.cap_bytes, bench.disk_bytes_per_second, number)
        open_group(group_name("check"), limits).close()
        settings = {**common["settings"], "cap_bytes": room.cap_bytes, "room_flags": room.flags}
        of_room = {**common, "settings": settings}
        places[room.name] = Place(bench, room, who.files_of(models), limits, slab_bytes, of_room)
    return places


def _show(
    bench: BenchCommand,
    who: Who,
    records: list[Record],
    answer: Answer,
    limit: TimeLimit,
    beside: Sequence[str],
) -> None:
    """Tables, warnings, and the sentences last."""
    names = [each.name for each in who.participants]
    for room in who.rooms:
        if len(who.rooms) > 1:
            print(f"{room.name}:")
        print(table(in_room(records, room.name), names, who.reference))
        print()
    if records:
        print(cache_line(records))
    for line in (*who.sweep.notes, *warnings_of(records)):
        print(f"warning: {line}")
    for line in beside:
        print(line)
    width = widths(answer)
    if width is None and bench.minutes is not None and answer.claims:
        width = "no whole pair: give more --minutes"
    if width is not None:
        print(f"{_spent(bench, limit)}{width}.")
    if bench.question is not None:
        for claim in answer.claims[1:] if not answer.is_too_small else ():
            print(claim.sentence)
        print(answer.headline)


def _check_failures(records: Sequence[Record]) -> None:
    """Raises `EngineError` where blocks failed: what was said of the others holds."""
    failed = [record for record in records if has_failed(record)]
    if failed:
        arms = ", ".join(dict.fromkeys(record["arm"] for record in failed))
        raise EngineError(
            EXIT_INTERNAL,
            f"bench: {len(failed)} of {len(records)} blocks failed ({arms}), the last one with: "
            f"{failed[-1]['error']}; with --out the same command measures them again",
        )


def _spent(bench: BenchCommand, limit: TimeLimit) -> str:
    left = limit.left()
    if left is None or bench.minutes is None:
        return ""
    return f"{bench.minutes - left / 60:.1f} of {bench.minutes:g} minutes gave "


@contextlib.contextmanager
def _blocks_file(folder: Path | None, common: Record) -> Iterator[BlocksFile | None]:
    """The lines of `--out`; None where nothing is kept. Raises `ConfigError`."""
    if folder is None:
        yield None
        return
    blocks = open_blocks(folder, common)
    try:
        yield blocks
    finally:
        blocks.close()
