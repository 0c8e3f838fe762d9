"""Our own program as an arm: its command line, and its JSON read back as `Timings`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator.bench.timings import BlockError, Span, Timings
from coordinator.command.bench_commands import Arm
from coordinator.command.config import Config
from coordinator.command.flag_values import ConfigError
from coordinator.command.line import parse
from coordinator.models.names import find_cached, parse_name
from coordinator.processes.program import Watched

KEPT = ("experts", "prefetch", "memory", "faults", "settings", "stop_reason")


def check_arm(arm: Arm) -> None:
    """Refuse flags that the program would refuse. Raises `ConfigError`."""
    _config_of(arm, ())


def model_of_arm(arm: Arm, model: Path) -> Path:
    """The file that it runs: the one that its flags name, else `model`. Raises `ConfigError`."""
    config = _config_of(arm, ("--model", str(model)))
    name = parse_name(str(config.model))
    if name is None:
        return config.model
    found = find_cached(name, config.model_cache)
    if found is None:
        raise ConfigError(
            f"--arm {arm.name!r}: expected a model that is on this machine, found {name}; run "
            "moe-coord with it once, or give the path of a file"
        )
    return found


def _config_of(arm: Arm, before: Sequence[str]) -> Config:
    try:
        command = parse([*before, *arm.flags, "--tokens", "0"])
    except ConfigError as error:
        raise ConfigError(f"--arm {arm.name!r}: {error}") from error
    if not isinstance(command, Config):
        raise ConfigError(
            f"--arm {arm.name!r}: expected flags of the main job, found a sub-command; "
            "write the flags only"
        )
    return command


def arm_command(
    arm: Arm,
    model: Path,
    prompt: Sequence[int],
    n_tokens: int,
    seed: int,
    temperature: int = 1,
) -> list[str]:
    """One whole process: this prompt, `n_tokens` drawn at this temperature with this seed."""
    return [
        sys.executable, "-P", "-m", "coordinator",
        "--model", str(model), *arm.flags,
        "--tokens", ",".join(map(str, prompt)),
        "-n", str(n_tokens), "--ignore-eos", "--temperature", str(temperature),
        "--seed", str(seed), "--json",
    ]  # fmt: skip


def read_arm(seen: Watched, n_prompt: int) -> Timings:
    """Its JSON. The first token's time is the prompt's: spans begin with the second."""
    try:
        record = json.loads(seen.output)
        timings = record["timings"]
        first, *others = timings["token_s"]
        prompt = Span(n_prompt, first, timings["started_monotonic_s"])
        started = prompt.started + first
        spans = []
        for seconds in others:
            spans.append(Span(1, seconds, started))
            started += seconds
        report = {key: record[key] for key in KEPT}
        report["token_time"] = {
            key: timings[key] for key in ("compute_s", "experts_s", "wait_disk_s", "coordination_s")
        }
        # by Little's law: seconds of all reads ÷ seconds of the run
        in_flight = record["experts"].get("read_s", 0.0) / max(1e-9, sum(timings["token_s"]))
        report["token_time"]["mean_reads_in_flight"] = round(in_flight, 4)
        return Timings(prompt, tuple(spans), tuple(record["tokens"]), report)
    except (ValueError, KeyError, TypeError) as error:
        raise BlockError(f"expected the JSON of a run, found {seen.output[:80]!r}") from error
