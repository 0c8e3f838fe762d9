"""`moe-coord ceiling`: what this disk and these cores allow, each measured alone.

No run can be faster than the slower of the two: compute with everything resident, and the disk's
rate ÷ the bytes that were missed. Everything is measured by processes of their own, one after the
other, so that nothing shares the cores with it; this module starts them and does the arithmetic.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compute_worker.arch import ModelSpec, dense_bytes, resolve
from coordinator.bench.arms import arm_command, read_arm
from coordinator.bench.machine import describe_machine, versions
from coordinator.bench.records import make_folder
from coordinator.bench.results import ANSWERS, draw_report, write_csv
from coordinator.bench.timings import Measured, measured
from coordinator.command.bench_commands import Arm, CeilingCommand
from coordinator.command.cores import usable_cores
from coordinator.command.flag_values import ConfigError
from coordinator.command.signals import StopSignals, stop_signals
from coordinator.plan.budget import token_cycle_bytes
from coordinator.plan.machine import read_machine
from coordinator.processes.engine import EngineError
from coordinator.processes.group import ProcessTree
from coordinator.processes.limits import ResourceError
from coordinator.processes.program import Watched, run_watched
from io_worker.model_file import open_model

N_WARM_UP, N_TOKENS = 16, 48
PROMPT = (5, 77, 300, 11)
TIMEOUT_SECONDS = 3600.0  # beside what was asked for
DISK_PARTS = (
    32  # of --seconds: each number of reads in flight, and a share for each way; rounded up
)
EXIT_INTERNAL = 5
LARGEST_BUFFER_BYTES = 1 << 30
SHARE_OF_MEMORY = 4  # the buffer takes at most this part of what is available
HELD_SHARE = 0.01  # of a file in the cache: less changes no rate
CEILING = "ceiling.json"
HIT_RATES = (0.0, 0.5, 0.75, 0.9, 0.95)
Record = dict[str, Any]


def run_ceiling(command: CeilingCommand) -> int:
    """Measure and print; returns the exit code. Raises `ConfigError` for a folder that cannot be
    used, `EngineError` if a part fails."""
    if command.out is not None:
        _check_folder(command.out)
    spec = resolve(open_model(command.model))
    record: Record = {
        "model": str(command.model),
        "slab_bytes": spec.slabs.mean_slab_bytes,
        "token_cycle_bytes": token_cycle_bytes(spec),
        "token_bytes": token_bytes(spec),
    }
    with stop_signals() as stop:
        if command.part != "compute":
            each = f"{command.seconds} s for each number of reads in flight"
            print(f"measuring the disk: {each}, then every way of reading", file=sys.stderr)
            record["disk"] = _disk(command, record["slab_bytes"], stop)
        if command.part != "disk" and stop.received is None:
            print("measuring memory, and compute with everything resident", file=sys.stderr)
            record["compute"] = _compute(command, spec, record["token_bytes"], stop)
    if stop.exit_code is not None:
        return stop.exit_code
    print(json.dumps(record) if command.json else "\n".join(lines(record)))
    if command.out is not None:
        _keep(command.out, record)
    return 0


def _check_folder(folder: Path) -> None:
    """Before minutes of measuring. Raises `ConfigError`: a folder has one report."""
    make_folder(folder)
    if (folder / ANSWERS).exists():
        raise ConfigError(
            f"--out: expected a folder without the results of `bench`, found some in "
            f"{str(folder)!a:.200}; give another path"
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--out: expected a folder that can be written, found {str(folder)!a:.200}; give "
            "another path"
        )


def _keep(folder: Path, record: Record) -> None:
    """JSON, CSV and charts in a folder."""
    record = {**record, "machine": describe_machine(), "versions": versions()}
    record["limits"] = [
        {"hit_rate": hit_rate, "tok_s": limit_at(record, hit_rate)}
        for hit_rate in [step / 20 for step in range(21)]
    ]
    (folder / CEILING).write_text(json.dumps(record, indent=1) + "\n")
    disk = record.get("disk", {})
    rows = [("direct", "random", row["depth"], row["gb_per_s"]) for row in disk.get("depths", ())]
    rows += [
        (row["way"], row["order"], row["depth"], row["gb_per_s"]) for row in disk.get("ways", ())
    ]
    write_csv(folder / "ceiling.csv", ("way", "order", "reads_in_flight", "gb_per_s"), rows)
    with stop_signals() as stop:
        draw_report(folder, stop)


def token_bytes(spec: ModelSpec) -> int:
    """Weight bytes that one token multiplies with: of an embedding beside an output, one row."""
    looked_up = spec.token_embedding.n_bytes if spec.output is not None else 0
    return dense_bytes(spec) - looked_up + token_cycle_bytes(spec)


def limit_at(record: Record, hit_rate: float) -> float | None:
    """Tokens/s at a hit rate: the slower of compute and disk. None without both parts."""
    if "disk" not in record or "tok_s" not in record.get("compute", {}):
        return None
    best = best_rate(record["disk"])
    missed = record["token_cycle_bytes"] * (1 - hit_rate)
    limit: float = record["compute"]["tok_s"]
    return min(limit, best * 1e9 / missed) if missed else limit


def best_rate(disk: Record) -> float:
    """GB/s at the number of reads in flight that gives most; 0 without O_DIRECT."""
    return max((row["gb_per_s"] for row in disk["depths"]), default=0.0)


def lines(record: Record) -> list[str]:
    """The report for people."""
    found = [
        f"one token multiplies with {record['token_bytes'] / 1e6:.0f} MB of weights, of which "
        f"{record['token_cycle_bytes'] / 1e6:.0f} MB are experts"
    ]
    disk = record.get("disk")
    if disk is not None:
        found.append(f"disk, O_DIRECT, {disk['read_bytes'] / 2**20:.2f} MiB at random places:")
        for row in disk["depths"]:
            seconds = " ".join(f"{rate:.2f}" for rate in row["per_second"])
            note = "  it throttles" if row["throttles"] else ""
            found.append(
                f"  {row['depth']} in flight  {row['gb_per_s']:6.2f} GB/s   "
                f"by second: {seconds}{note}"
            )
        if disk["direct_refusal"]:
            found.append(f"  not measured: {disk['direct_refusal']}")
        found += [_way_line(row) for row in disk.get("ways", ())]
    compute = record.get("compute")
    if compute is not None:
        bus = compute["bus"]
        found.append(
            f"memory bus, {bus['threads']} thread(s), {bus['reader']}: {bus['gb_per_s']:.1f} GB/s, "
            f"which allows {bus['gb_per_s'] * 1e9 / record['token_bytes']:.1f} tokens/s"
        )
        if "tok_s" in compute:
            found.append(
                f"compute, everything resident: {compute['tok_s']:.2f} tokens/s, "
                f"{compute['bus_share']:.0%} of the memory bus"
            )
        else:
            found.append(f"compute, everything resident: not measured: {compute['refusal']}")
    for hit_rate in HIT_RATES:
        limit = limit_at(record, hit_rate)
        if limit:
            found.append(f"limit at a hit rate of {hit_rate:4.0%}: {limit:.2f} tokens/s")
    if limit_at(record, 0.0):
        found.append(_which_limits(record))
    return found


def _which_limits(record: Record) -> str:
    """Where disk and compute are equally fast, of a record with both."""
    rate, compute = best_rate(record["disk"]), record["compute"]["tok_s"]
    share = 1 - rate * 1e9 / (record["token_cycle_bytes"] * compute)
    start = f"the disk gives {rate:.2f} GB/s, compute {compute:.2f} tokens/s: "
    if share <= 0:
        return f"{start}compute is the limit even if every expert is read anew"
    return f"{start}below a hit rate of {share:.0%} the disk is the limit"


def _way_line(row: Record) -> str:
    held = row["cached"] or 0.0
    note = f"  {held:.0%} of the file was in memory already" if held > HELD_SHARE else ""
    return (
        f"  {row['way']:<9} {row['order']:<10} {row['depth']} in flight  "
        f"{row['gb_per_s']:6.2f} GB/s{note}"
    )


def _disk(command: CeilingCommand, n_bytes: int, stop: StopSignals) -> Record:
    arguments = [str(command.model), "--read-bytes", str(n_bytes), "--ways"]
    arguments += ["--seconds", str(command.seconds)]
    return _json_of("io_worker.disk_speed", arguments, stop, disk_timeout_seconds(command.seconds))


def disk_timeout_seconds(seconds: int) -> float:
    """What the disk's part may take with so many `--seconds`."""
    return TIMEOUT_SECONDS + DISK_PARTS * seconds


def _compute(
    command: CeilingCommand, spec: ModelSpec, n_token_bytes: int, stop: StopSignals
) -> Record:
    n_threads = command.compute_threads or len(usable_cores())
    room = read_machine().memory.n_bytes // SHARE_OF_MEMORY
    n_buffer = max(1 << 20, min(LARGEST_BUFFER_BYTES, room) // 4096 * 4096)
    arguments = ["--threads", str(n_threads), "--bytes", str(n_buffer)]
    record: Record = {"bus": _json_of("compute_worker.bus_speed", arguments, stop)}
    if stop.received is not None:
        return record
    try:
        tokens = _resident_run(command, spec, n_threads, stop)
    except ResourceError as error:
        return record | {"refusal": str(error)}
    rate = tokens.tokens_per_second
    share = rate * n_token_bytes / (record["bus"]["gb_per_s"] * 1e9)
    return record | {"tok_s": round(rate, 3), "bus_share": round(share, 4)}


def _resident_run(
    command: CeilingCommand, spec: ModelSpec, n_threads: int, stop: StopSignals
) -> Measured:
    """Raises `ResourceError` if not everything fits."""
    arm = Arm("resident", ("--pool", "all", "--compute-threads", str(n_threads)))
    prompt = [token % spec.vocabulary_size for token in PROMPT]
    program = arm_command(arm, command.model, prompt, 1 + N_WARM_UP + N_TOKENS, seed=1)
    seen = _run(program, stop)
    if stop.received is not None:
        return Measured(0, 0.0, 0.0, 0.0)
    if seen.exit_code in (2, 4):
        raise ResourceError(_last_line(seen))
    if seen.exit_code != 0:
        raise EngineError(EXIT_INTERNAL, f"ceiling: the run failed: {_last_line(seen)}")
    return measured(read_arm(seen, len(prompt)).spans, N_WARM_UP, N_TOKENS)


def _json_of(
    module: str,
    arguments: Sequence[str],
    stop: StopSignals,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Record:
    seen = _run([sys.executable, "-P", "-m", module, *arguments], stop, timeout_seconds)
    if seen.exit_code != 0 and stop.received is None:
        raise EngineError(EXIT_INTERNAL, f"ceiling: {module}: {_last_line(seen)}")
    record: Record = json.loads(seen.output) if stop.received is None else {}
    return record


def _run(
    program: Sequence[str], stop: StopSignals, timeout_seconds: float = TIMEOUT_SECONDS
) -> Watched:
    return run_watched(program, ProcessTree(), stop, timeout_seconds)


def _last_line(seen: Watched) -> str:
    return next((line for _, line in reversed(seen.error_lines) if line.strip()), "no output")
