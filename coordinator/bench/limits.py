"""What the disk and the cores would have allowed a block, and which share of it the block reached.

The disk is measured right before the block, inside the block's own limits, by a process of its own;
the compute times are the block's own. Two limits per token, both from the bytes that the block
missed:

    serial     dense compute + missed bytes ÷ disk      nothing of the experts' reading is hidden
    overlapped max(compute, missed bytes ÷ disk)        all of it is

A share of the first above 1 says that reading was hidden behind the dense part (prefetch).
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from coordinator.bench.cgroup import group_name, open_group
from coordinator.bench.records import Record, value_of
from coordinator.command.signals import StopSignals
from coordinator.processes.group import Limits
from coordinator.processes.program import run_watched

SECONDS = 1.5
READS_IN_FLIGHT = 4
TIMEOUT_SECONDS = 60.0


def disk_bytes_per_second(
    path: str, slab_bytes: int, limits: Limits, stop: StopSignals, seconds_left: float
) -> float | None:
    """Of O_DIRECT reads of one slab each at random places; None where there are none, or too little
    time is left for them."""
    group = open_group(group_name("disk-limit"), limits)
    try:
        program = [
            sys.executable, "-P", "-m", "io_worker.disk_speed", path,
            "--read-bytes", str(slab_bytes),
            "--depths", str(READS_IN_FLIGHT), "--seconds", str(SECONDS),
        ]  # fmt: skip
        seen = run_watched(program, group, stop, min(TIMEOUT_SECONDS, seconds_left))
    finally:
        group.close()
    if seen.exit_code != 0:
        return None
    depths = json.loads(seen.output)["depths"]
    return float(depths[0]["gb_per_s"]) * 1e9 if depths else None


def shares(record: Record) -> Mapping[str, float] | None:
    """Share of each limit that a block reached; None where something of it was not measured."""
    times: Mapping[str, Any] = value_of(record, ("report", "token_time")) or {}
    rate, missed = record.get("disk_bytes_per_second"), record["bytes"].get("per_token")
    if "error" in record or not (rate and record.get("tok_s") and "experts_s" in times):
        return None
    disk_s, compute_s = (missed or 0) / rate, times["compute_s"]
    seconds = 1 / record["tok_s"]
    return {
        "serial": (compute_s - times["experts_s"] + disk_s) / seconds,
        "overlapped": max(compute_s, disk_s) / seconds,
    }
