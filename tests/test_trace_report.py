"""The commands over a trace, as a user meets them."""

import io
import json
from pathlib import Path

import pytest
from arms import run_program

from coordinator.command.flag_values import ConfigError
from coordinator.command.sizes import PoolSize
from coordinator.command.trace_commands import ReplayCommand, TraceCommand
from coordinator.core.slot_classes import PoolTooSmallError
from coordinator.routing.replay_report import show_replay
from coordinator.routing.trace_file import TraceHeader, create_trace
from coordinator.routing.trace_report import show_trace
from coordinator.routing.usage import UsageCounts, write_usage
from shm.messages import ExpertUse, Need

MiB = 1 << 20
HEADER = TraceHeader("f00d", 8, 2, (0, 1), ((MiB, MiB, MiB),), (0, 0))


def write(path: Path, header: TraceHeader = HEADER) -> Path:
    writer = create_trace(path, header)
    for step in range(1, 12):
        for layer in header.layers:
            uses = (ExpertUse(step % 3, 1, int(step == 1)), ExpertUse(3 + step % 5, 1, 0))
            writer.add(Need(step, layer, uses, (1, 2) if layer == 0 else (), ()))
    writer.close()
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "t.trace")


def replayed(command: ReplayCommand) -> dict[tuple[str, str], dict[str, int]]:
    output = io.StringIO()
    show_replay(command, output)
    record = json.loads(output.getvalue())
    return {(found["policy"], found["pool"]): found for found in record["results"]}


def test_every_policy_that_can_takes_part(trace: Path) -> None:
    found = replayed(ReplayCommand(trace, json=True))
    assert {policy for policy, _ in found} == {
        "belady", "page cache", "lru", "layer-lru", "lfu", "slru", "calibrated",
    }  # fmt: skip
    assert {pool for _, pool in found} == {"25%", "50%", "75%"}  # 10 % are less than two slots
    for (_, pool), result in found.items():
        assert result["hits"] <= found["belady", pool]["hits"]
        misses = result["requests"] - result["hits"]
        assert result["missed_bytes"] == misses * 3 * MiB


def test_a_file_of_counts_brings_those_that_need_one(trace: Path, tmp_path: Path) -> None:
    usage = UsageCounts("f00d", 2, 8)
    usage.counts.update({(0, 1): 3.0, (1, 4): 2.0})
    write_usage(tmp_path / "hot.json", usage)
    command = ReplayCommand(trace, policies=("static",), hot_set=tmp_path / "hot.json", json=True)
    assert ("static", "50%") in replayed(command)
    usage.fingerprint = "beef"
    write_usage(tmp_path / "hot.json", usage)
    with pytest.raises(ConfigError, match="--hot-set: expected counts of this model"):
        replayed(command)


def test_where_everything_fits_everything_hits(trace: Path) -> None:
    found = replayed(ReplayCommand(trace, pools=(PoolSize(share=1.0),), json=True))
    assert all(result["hits"] == result["requests"] for result in found.values())


def test_sizes_that_cannot_be(trace: Path) -> None:
    with pytest.raises(PoolTooSmallError):
        show_replay(ReplayCommand(trace, pools=(PoolSize(n_bytes=MiB),)), io.StringIO())
    output = io.StringIO()
    show_replay(ReplayCommand(trace), output)
    assert "10% is less than two slots: left out" in output.getvalue()
    with pytest.raises(ConfigError, match="expected counts for static"):
        show_replay(ReplayCommand(trace, policies=("static",)), io.StringIO())


def test_tables_say_what_they_are(trace: Path, tmp_path: Path) -> None:
    output = io.StringIO()
    show_replay(ReplayCommand(trace), output)
    show_trace(TraceCommand(trace, write(tmp_path / "other")), output)
    text = output.getvalue()
    for title in ("hits of 44 requests", "MiB missed per decode step", "skew: ", "locality: ",
                  "working set: ", "guesses: ", "transfer: "):  # fmt: skip
        assert title in text
    assert max(map(len, text.splitlines())) <= 120


def test_json_of_a_trace(trace: Path) -> None:
    output = io.StringIO()
    show_trace(TraceCommand(trace, json=True), output)
    record = json.loads(output.getvalue())
    assert (record["n_prompt_steps"], record["n_decode_steps"], record["requests"]) == (1, 10, 44)
    assert [found["predictor"] for found in record["predictors"]][-1] == "router"
    assert record["transfer"] == []


def test_traces_of_two_models_have_nothing_in_common(trace: Path, tmp_path: Path) -> None:
    header = TraceHeader("beef", 8, 2, (0, 1), ((MiB, MiB, MiB),), (0, 0))
    with pytest.raises(ConfigError, match="a trace of the same model"):
        show_trace(TraceCommand(trace, write(tmp_path / "other", header)), io.StringIO())


def test_a_closed_output_is_no_error(trace: Path) -> None:
    show_trace(TraceCommand(trace), None)
    show_replay(ReplayCommand(trace), None)


@pytest.mark.parametrize("command", ["trace", "replay"])
def test_on_the_command_line(trace: Path, command: str) -> None:
    done = run_program(command, str(trace))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    bad = run_program(command, __file__)
    assert bad.returncode == 2
    assert bad.stderr.startswith("moe-coord: error: TRACE: expected ")
    assert bad.stderr.count("\n") == 1
