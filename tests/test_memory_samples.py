"""Accounted memory of whole runs, sampled from outside, in the smallest budget that they accept."""

import json
import math
import re
import subprocess
import time
from pathlib import Path

import pytest
from arms import PROGRAM, run_program, spelled
from faults import pressed_model
from memory_samples import Samples, sampled

MiB = 1 << 20
PROMPT = spelled([token % 300 for token in range(7, 300)])
# ours counts processes that have just begun a moment later or earlier than the sampler does
SLACK_BYTES = 3 * MiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed_model(tmp_path_factory.mktemp("samples"))


def least_memory(flags: list[str]) -> int:
    """MiB that the program says it needs at least."""
    done = run_program(*flags, "--memory", "1M")
    assert done.returncode == 4
    found = re.search(r"expected at least ([0-9.]+) MiB", done.stderr)
    assert found is not None, done.stderr
    return math.ceil(float(found[1]) + 0.6)  # it is shown rounded


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--io-workers", "3", "--queue-depth", "2"],
        ["--io-workers", "0", "--io-threads", "2"],
        ["--kernels", "numpy"],
        ["--single-process"],
    ],
    ids=" ".join,
)
def test_memory_stays_within_the_smallest_budget(model: Path, flags: list[str]) -> None:
    base = ["--model", str(model), "--tokens", PROMPT, "-n", "10", "--ignore-eos", *flags]
    memory = least_memory(base)
    command = [*PROGRAM, *base, "--memory", f"{memory}M", "--json"]
    output, samples = run_sampled(command)
    record = json.loads(output)
    peak = samples.peak
    assert peak.accounted_bytes <= memory * MiB, peak
    assert peak.pool_bytes == record["memory"]["pool_bytes"]
    assert abs(record["memory"]["total_peak_bytes"] - peak.accounted_bytes) < SLACK_BYTES
    assert record["memory"]["total_peak_bytes"] <= memory * MiB


def run_sampled(command: list[str]) -> tuple[str, Samples]:
    """Standard output of a run, and what was seen of it."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        samples = sampled(process, started, 0.02)
        assert process.stdout is not None
        return process.stdout.read(), samples
