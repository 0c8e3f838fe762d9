"""Measures disk and arithmetic for a plan, each alone in a process of its own. Loads nothing."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from coordinator.command.signals import StopSignals
from coordinator.plan.forecast import ComputeTimes, Measured
from coordinator.plan.setup import Setup
from coordinator.processes.engine import EngineError
from coordinator.processes.group import ProcessTree
from coordinator.processes.program import Watched, run_watched

EXIT_INTERNAL = 5
TIMEOUT_SECONDS = 3600.0
MAX_WORK_BYTES = 192 * 1024 * 1024  # of weights that the compute probe makes up
SHARE_OF_MEMORY = 3  # they take at most this part of what is available
MAX_PROMPT_TOKENS = 128  # of the chunk that is computed
Record = dict[str, Any]


def json_of(module: str, arguments: Sequence[str], stop: StopSignals) -> Record:
    """What a measuring module prints; empty after a signal. Raises `EngineError`."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    seen = run_watched(command, ProcessTree(), stop, TIMEOUT_SECONDS)
    if stop.received is not None:
        return {}
    if seen.exit_code != 0:
        raise EngineError(EXIT_INTERNAL, f"{module}: {_last_line(seen)}")
    record: Record = json.loads(seen.output)
    return record


def disk_record(setup: Setup, seconds: float, compute: Record, stop: StopSignals) -> Record:
    """Seconds of bursts of experts with the reader and the reads in flight of the run; before each
    the disk idles as long as it does between the reads of two layers, as `compute` measured."""
    config, spec = setup.config, setup.spec
    decode = compute["decode"]
    pause_seconds = decode["dense_s"] / spec.n_layers + decode["expert_s"]
    inline = config.io_workers == 0 and config.io_threads == 0
    sizes = [size for size in (1, 2, 4, 8, 16) if size < spec.n_active] + [spec.n_active]
    arguments = [
        str(config.model),
        *("--layers", str(spec.n_layers), "--experts", str(spec.n_experts)),
        *("--sizes", ",".join(map(str, sizes))),
        *("--depth", str(0 if inline else setup.reads_in_flight)),
        *("--reader", setup.reader.name if config.has_pool else "direct"),
        *("--seconds", str(seconds), "--pause-seconds", f"{pause_seconds:.6f}"),
        "--packed-too",
    ]
    return json_of("io_worker.burst_speed", arguments, stop)


def compute_record(setup: Setup, room_bytes: int, seconds: float, stop: StopSignals) -> Record:
    """Seconds of steps of the model's shapes with the kernels and threads of the run."""
    config = setup.config
    arguments = [
        str(config.model),
        *("--threads", str(config.compute_threads)),
        *("--kernels", config.kernels, "--numerics", config.numerics),
        *("--kv-type", config.kv_type),
        *("--prompt-tokens", str(min(MAX_PROMPT_TOKENS, setup.plan.chunk_tokens))),
        *("--work-bytes", str(min(MAX_WORK_BYTES, room_bytes // SHARE_OF_MEMORY))),
        *("--seconds", str(seconds / 2)),
    ]
    return json_of("compute_worker.step_speed", arguments, stop)


def measured_of(disk: Record, compute: Record, bursts: str = "burst_s") -> Measured:
    """The two records as a forecast takes them, with one of the kinds of bursts."""
    return Measured(
        burst_seconds={int(size): seconds for size, seconds in disk[bursts].items()},
        decode=ComputeTimes(1, compute["decode"]["dense_s"], compute["decode"]["expert_s"]),
        prompt=ComputeTimes(
            compute["prompt_tokens"], compute["prompt"]["dense_s"], compute["prompt"]["expert_s"]
        ),
    )


def _last_line(seen: Watched) -> str:
    return next((line for _, line in reversed(seen.error_lines) if line.strip()), "no output")
