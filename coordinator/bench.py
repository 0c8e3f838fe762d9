"""`moe-coord bench`: settings against each other, and against other programs, in paired blocks.

Rounds run A B, then B A, and so on: what drifts meanwhile (heat, other work, a disk that slows
down) falls on all arms alike. Every arm of a round gets the same random prompt and seed, every
round another one. A block is one whole process; see `bench_block`.
"""

import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from compute_worker.arch import resolve
from coordinator.bench_arms import arm_command, check_arm, read_arm
from coordinator.bench_block import Participant, Place, run_block
from coordinator.bench_commands import Arm, BenchCommand, PeerCommand
from coordinator.bench_disk import Disk, disk_of, read_ahead
from coordinator.bench_group import Limits
from coordinator.bench_machine import describe_machine, versions
from coordinator.bench_peer import peer_of
from coordinator.bench_process import StopSignals, stop_signals
from coordinator.bench_table import block_line, table
from coordinator.budget import ResourceError
from coordinator.engine import EngineError
from coordinator.flag_values import ConfigError
from io_worker.model_file import open_model

Record = dict[str, Any]
EXIT_INTERNAL = 5


def run_bench(bench: BenchCommand) -> int:
    """Run all blocks and print the table; returns the exit code.

    Raises `ConfigError`, `ModelFormatError`, `ModelFileError`, `ResourceError`, and `EngineError`
    for an arm that fails in its first block without having been killed for its memory.
    """
    model = open_model(bench.model)
    size = resolve(model).vocabulary_size
    who = participants(bench)
    disk = disk_of(bench.model)
    place = Place(bench, tuple(map(Path, model.paths)), _limits(bench, disk), _common(bench, disk))
    records: list[Record] = []
    with (
        stop_signals() as stop,
        _lines_to(bench.out) as write,
        read_ahead(disk, bench.read_ahead_kib),
    ):
        for record in _blocks(bench, who, size, place, stop):
            records.append(record)
            write(record)
            print(block_line(record, len(records), len(who) * bench.n_pairs), file=sys.stderr)
            if "error" in record and record["round"] == 0 and not record["memory"]["oom_kills"]:
                raise EngineError(EXIT_INTERNAL, f"{record['arm']}: {record['error']}")
    print(table(records, [each.name for each in who], reference(bench)))
    return stop.exit_code or 0


def participants(bench: BenchCommand) -> list[Participant]:
    """Arms and peers in the order they were named. Raises `ConfigError`."""
    arms = bench.arms or (Arm("moe-coord", ()),)
    for arm in arms:
        check_arm(arm)
    found = [_our_arm(arm, bench) for arm in arms] + [_peer(peer, bench) for peer in bench.peers]
    counts = Counter(each.name for each in found)
    twice = next((name for name, n in counts.items() if n > 1), None)
    if twice is not None:
        raise ConfigError(f"--arm: expected every name once, found {twice!r} again; rename one")
    if bench.against is not None and bench.against not in counts:
        raise ConfigError(
            f"--against: expected one of {', '.join(counts)}, found {bench.against[:60]!a}; "
            "name an arm or a peer"
        )
    return found


def reference(bench: BenchCommand) -> str:
    """Name of what the others are divided by."""
    if bench.against is not None:
        return bench.against
    if bench.peers:
        return bench.peers[0].name
    return bench.arms[0].name if bench.arms else "moe-coord"


def prompt_of_round(bench: BenchCommand, n_round: int, vocabulary_size: int) -> list[int]:
    """Random ids: the same for all arms of a round, others in the next."""
    draw = random.Random(f"{bench.seed}/{n_round}")
    return [draw.randrange(vocabulary_size) for _ in range(bench.n_prompt)]


def order_of_round(who: Sequence[Participant], n_round: int) -> list[Participant]:
    """A B, then B A."""
    return list(who) if n_round % 2 == 0 else list(reversed(who))


def _blocks(
    bench: BenchCommand,
    who: Sequence[Participant],
    vocabulary_size: int,
    place: Place,
    stop: StopSignals,
) -> Iterator[Record]:
    """Until all are done or a signal comes; a block that a signal cut short is not one."""
    for n_round in range(bench.n_pairs):
        prompt = prompt_of_round(bench, n_round, vocabulary_size)
        for each in order_of_round(who, n_round):
            record = run_block(each, prompt, n_round, place, stop)
            if stop.received is not None:
                return
            yield record


def _our_arm(arm: Arm, bench: BenchCommand) -> Participant:
    return Participant(
        arm.name,
        "moe-coord",
        lambda prompt, seed: arm_command(arm, bench.model, prompt, bench.n_generated, seed),
        lambda seen: read_arm(seen, bench.n_prompt),
    )


def _peer(peer: PeerCommand, bench: BenchCommand) -> Participant:
    rules = peer_of(peer)
    rules.command(peer, bench, (0,), 0)  # refuse now what it would refuse later
    return Participant(
        peer.name,
        Path(peer.command[0]).name,
        lambda prompt, seed: rules.command(peer, bench, prompt, seed),
        lambda seen: rules.read(seen, bench),
    )


def _limits(bench: BenchCommand, disk: Disk | None) -> Limits:
    if bench.disk_bytes_per_second is not None and disk is None:
        raise ResourceError(
            f"--disk-rate: expected {bench.model} on a disk, found a file system without one; "
            "use a copy on a disk"
        )
    number = disk.number if disk is not None else None
    return Limits(bench.cap_bytes, bench.disk_bytes_per_second, number)


def _common(bench: BenchCommand, disk: Disk | None) -> Record:
    return {
        "settings": {
            "model": str(bench.model),
            "cap_bytes": bench.cap_bytes,
            "disk_bytes_per_second": bench.disk_bytes_per_second,
            "read_ahead_kib": bench.read_ahead_kib,
            "read_ahead_kib_before": disk.read_ahead_kib if disk is not None else None,
            "nice": bench.niceness,
            "keep_cache": bench.keep_cache,
            "pairs": bench.n_pairs,
            "tokens": bench.n_tokens,
            "warm_up": bench.n_warm_up,
            "prompt_tokens": bench.n_prompt,
            "seed": bench.seed,
        },
        "machine": describe_machine(),
        "disk": disk.describe() if disk is not None else None,
        "versions": versions(),
    }


@contextlib.contextmanager
def _lines_to(path: Path | None) -> Iterator[Callable[[Record], None]]:
    """A writer of JSON lines that appends and keeps each line at once. Raises `ConfigError`."""
    if path is None:
        yield lambda record: None
        return
    try:
        file: TextIO = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out: expected a path that can be written, found {str(path)!a:.200}: "
            f"{error.strerror}; give another path"
        ) from error

    def write(record: Record) -> None:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()

    with file:
        yield write
