"""One block: one whole process in a fresh group, from the cache state that was asked for.

What it returns is the JSON line of the block, complete enough to judge it without the others.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.bench.cache import cached_bytes, drop_cache, drop_files
from coordinator.bench.cgroup import group_name, open_group
from coordinator.bench.limits import disk_bytes_per_second
from coordinator.bench.machine import state_of_machine
from coordinator.bench.rooms import Room
from coordinator.bench.timings import BlockError, Timings, measured
from coordinator.command.bench_commands import BenchCommand
from coordinator.command.signals import StopSignals
from coordinator.processes.group import Limits
from coordinator.processes.program import Watched, run_watched

TIMEOUT_SECONDS = 1800.0
N_ERROR_CHARACTERS = 500
CACHE_KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Participant:
    """An arm or a peer: its command in a room for prompt and seed, how its answer is read."""

    name: str
    kind: str
    command: Callable[[Room, Sequence[int], int], list[str]]
    read: Callable[[Watched], Timings]


@dataclass(frozen=True, slots=True)
class Place:
    """What all blocks have in common beside the command."""

    bench: BenchCommand
    room: Room
    model_paths: tuple[Path, ...]
    limits: Limits
    slab_bytes: int  # of an expert, on average
    common: Mapping[str, Any]  # settings, machine, versions: the same in every line


def run_block(
    who: Participant,
    prompt: Sequence[int],
    n_round: int,
    place: Place,
    stop: StopSignals,
    deadline: float | None = None,
) -> dict[str, Any] | None:
    """Run it and measure. A program that fails is a record with `error`; raises `ResourceError`.

    None: a signal came, or the `deadline` on the monotonic clock, before it ended.
    """
    bench = place.bench
    record = _prepared(who, prompt, n_round, place)
    record["disk_bytes_per_second"] = _disk_limit(who, place, stop, deadline)
    # now: what is above may have written gigabytes back, and measured the disk
    timeout = min(TIMEOUT_SECONDS, _seconds_to(deadline))
    if stop.received is not None or timeout <= 0:
        return None
    group = open_group(group_name("block"), place.limits)
    try:
        seen = run_watched(record["command"], group, stop, timeout, bench.niceness)
        memory = group.memory()
        n_cached = cached_bytes(place.model_paths)
    finally:
        group.close()
    if stop.received is not None or (seen.is_timed_out and timeout < TIMEOUT_SECONDS):
        return None
    record |= {
        "after": state_of_machine(),
        "cached_after": n_cached,
        "wall_s": round(seen.ended - seen.started, 3),
        "others_cores": round(seen.others_cores, 3),
        "exit_code": seen.exit_code,
        "faults": {"major": seen.major_faults, "minor": seen.minor_faults},  # of the whole block
        "memory": {
            "peak_bytes": memory.peak_bytes,
            "limit_hits": memory.limit_hits,
            "oom_kills": memory.oom_kills,
            "file_cache_bytes": memory.file_cache_bytes,
        },
        "bytes": {"source": group.bytes_source, "block": seen.read_bytes[-1][1]},
    }
    try:
        record |= _figures(who, seen, bench, record["bytes"])
    except BlockError as error:
        record["error"] = str(error)
    record.update(place.common)
    return record


def _prepared(
    who: Participant, prompt: Sequence[int], n_round: int, place: Place
) -> dict[str, Any]:
    """The cache as it was asked for, and what is known before the block runs."""
    bench = place.bench
    cache = _cache_before(place)
    command = who.command(place.room, prompt, bench.seed + n_round)
    return {
        "round": n_round,
        "room": place.room.name,
        "room_short": place.room.short,
        "arm": who.name,
        "kind": who.kind,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "prompt": list(prompt),
        "cache": cache,
        "cached_before": cached_bytes(place.model_paths),
        "before": state_of_machine(),
    }


def _seconds_to(deadline: float | None) -> float:
    return deadline - time.monotonic() if deadline is not None else math.inf


def _disk_limit(
    who: Participant, place: Place, stop: StopSignals, deadline: float | None
) -> float | None:
    """Measured where it was asked for: a peer does not tell its compute times, which go with it."""
    seconds_left = _seconds_to(deadline)
    if not place.bench.limits or who.kind != "moe-coord" or seconds_left <= 0:
        return None
    return disk_bytes_per_second(
        str(place.model_paths[0]), place.slab_bytes, place.limits, stop, seconds_left
    )


def _cache_before(place: Place) -> str:
    """What was done to the page cache. Under a cap all of it goes, so that the block is charged
    for every library that it loads, as on a machine of that size."""
    if place.bench.keep_cache:
        return CACHE_KEPT
    if place.room.cap_bytes is not None:
        return drop_cache(place.model_paths)
    return drop_files(place.model_paths)


def _figures(
    who: Participant, seen: Watched, bench: BenchCommand, n_bytes: dict[str, Any]
) -> dict[str, Any]:
    """What was measured; completes `n_bytes`. Raises `BlockError`."""
    if seen.is_timed_out:
        raise BlockError(f"did not end within {TIMEOUT_SECONDS:.0f} s")
    if seen.exit_code != 0:
        said = [line for _, line in seen.error_lines if line.strip()] or ["no output"]
        raise BlockError(f"exit {seen.exit_code}: {said[-1][:N_ERROR_CHARACTERS]}")
    timings = who.read(seen)
    counts = measured(timings.spans, bench.n_warm_up, bench.n_tokens)
    figures: dict[str, Any] = {
        "tok_s": round(counts.tokens_per_second, 4) if counts.n_tokens else None,
        "prompt_tok_s": None,
        "measured_tokens": counts.n_tokens,
        "measured_s": round(counts.seconds, 6),
    }
    start, stop, n_tokens = counts.start, counts.stop, counts.n_tokens
    prompt = timings.prompt
    if prompt is not None:
        figures["prompt_s"] = round(prompt.seconds, 6)
        figures["prompt_tok_s"] = round(prompt.n_tokens / prompt.seconds, 4)
        if n_tokens == 0:
            start, stop = prompt.started, prompt.started + prompt.seconds
            n_tokens = prompt.n_tokens
    n_bytes["measured"] = seen.bytes_between(start, stop)
    n_bytes["per_token"] = round(n_bytes["measured"] / n_tokens) if n_tokens else None
    spans = [[span.n_tokens, round(span.seconds, 6)] for span in timings.spans]
    return figures | {
        "spans": spans,
        "tokens": list(timings.tokens),
        "report": dict(timings.report),
    }
