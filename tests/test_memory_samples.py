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
from gguf_builder import tiny_model
from memory_samples import Samples, sampled

from compute_worker.arch import resolve
from coordinator.core.slot_classes import whole_pool_bytes
from io_worker.model_file import open_model

MiB = 1 << 20
PROMPT = spelled([token % 300 for token in range(7, 300)])
# ours counts processes that have just begun a moment later or earlier than the sampler does
SLACK_BYTES = 3 * MiB
POOL_MIB = 6  # of hot experts beyond the smallest pool


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
    # long enough that the sampler, too, sees it when all is there
    base = ["--model", str(model), "--tokens", PROMPT, "-n", "40", "--ignore-eos", *flags]
    memory = least_memory(base)
    command = [*PROGRAM, *base, "--memory", f"{memory}M", "--json"]
    output, samples = run_sampled(command)
    record = json.loads(output)
    peak = samples.peak
    assert peak.accounted_bytes <= memory * MiB, peak
    assert peak.pool_bytes == record["memory"]["pool_bytes"]
    assert abs(record["memory"]["total_peak_bytes"] - peak.accounted_bytes) < SLACK_BYTES
    assert record["memory"]["total_peak_bytes"] <= memory * MiB


def test_static_pins_of_an_mxfp4_file_stay_within_the_budget(tmp_path: Path) -> None:
    """A hot set that would fill the whole pool: from the first sample on there is no excess."""
    model = tiny_model(
        tmp_path / "mxfp4.gguf", n_layers=4, n_experts=16, n_active=4, quantisation="MXFP4",
        width=256, expert_width=512,
    )  # fmt: skip
    hot_set = tmp_path / "hot.json"
    prompt = ("--model", str(model), "--tokens", PROMPT, "--ignore-eos")
    calibrated = run_program("calibrate", *prompt[1:], "-n", "4", "--out", str(hot_set))
    assert calibrated.returncode == 0, calibrated.stderr
    flags = [*prompt, "-n", "10", "--policy", "static", "--hot-set", str(hot_set)]
    memory = least_memory(flags) + POOL_MIB
    output, samples = run_sampled([*PROGRAM, *flags, "--memory", f"{memory}M", "--json"])
    record = json.loads(output)
    assert record["settings"]["policy"] == "static"
    assert 0 < record["experts"]["misses"] < record["experts"]["requests"]
    whole_bytes = whole_pool_bytes(resolve(open_model(model)).slabs)
    assert record["memory"]["pool_bytes"] < whole_bytes, "not all fit"
    assert max(sample.accounted_bytes for sample in samples.samples) <= memory * MiB
    assert record["memory"]["total_peak_bytes"] <= memory * MiB


def run_sampled(command: list[str]) -> tuple[str, Samples]:
    """Standard output of a run, and what was seen of it."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        samples = sampled(process, started, 0.02)
        assert process.stdout is not None
        return process.stdout.read(), samples
