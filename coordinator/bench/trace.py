"""Routing traces beside a comparison: the prompts of its first two rounds, once each.

Routing does not depend on pool, policy or reader, so one run with the largest pool that fits is
enough for what the report says of experts and policies. The runs are no blocks: nothing is timed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator.bench.arms import arm_command
from coordinator.command.bench_commands import Arm
from coordinator.command.signals import StopSignals
from coordinator.processes.group import ProcessTree
from coordinator.processes.program import run_watched

TRACES = ("trace-1.bin", "trace-2.bin")
SHARE_OF_TIME = 0.15  # at most, for both


def record_traces(
    folder: Path,
    model: Path,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    seconds: float,
    stop: StopSignals,
) -> str | None:
    """Write those that are missing; returns why one is. `seconds`: for each run, at most."""
    for name, prompt in zip(TRACES, prompts, strict=True):
        path = folder / name
        if path.exists() or stop.received is not None:
            continue
        part = path.with_name(name + ".part")
        arm = Arm("trace", ("--trace", str(part)))
        command = arm_command(arm, model, prompt, n_tokens, 1)
        print(f"recording the routing of a prompt: {path}", file=sys.stderr)
        seen = run_watched(command, ProcessTree(), stop, seconds)
        if seen.exit_code != 0 or seen.is_timed_out:
            part.unlink(missing_ok=True)
            return f"no chart of experts and policies: a traced run did not end in {seconds:.0f} s"
        part.replace(path)
    return None
