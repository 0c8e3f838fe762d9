"""What one has to be wary of is said, and nothing else."""

from typing import Any

import pytest
from bench_blocks import block

from coordinator.bench.records import Record
from coordinator.bench.warnings import disk_rate, warnings_of


def series(*changes: dict[str, Any]) -> list[Record]:
    return [block("a", n, 10, **change) for n, change in enumerate(changes)]


def waiting(n_bytes: int) -> dict[str, Any]:
    """A block that waited half of its time for so many bytes per token."""
    return {
        "bytes": {"per_token": n_bytes, "measured": 1},
        "report": {"settings": {"reader": "direct", "dense": "anonymous"},
                   "token_time": {"wait_disk_s": 0.05}},
    }  # fmt: skip


QUIET: tuple[dict[str, Any], ...] = ({},) * 6
CASES: dict[str, tuple[list[Record], str]] = {
    "disk": (
        series(*[waiting(n) for n in (100, 100, 100, 70, 70, 70)]),
        "a: the disk may throttle: 0 MB per second of waiting",
    ),
    "drift": (
        [block("a", n, rate, report={}) for n, rate in enumerate((10, 10, 10, 8, 8, 8))],
        "ran -20%",
    ),
    "heat": (series({"after": {"hottest_c": 95.0}}), "95 °C"),
    "throttle": (
        series({"before": {"throttle_count": 3}, "after": {"throttle_count": 7}}),
        "throttled 4 times",
    ),
    "battery": (series({"before": {"on_mains": False}}), "on battery"),
    "others": (series({"others_cores": 1.5}), "kept 1.5 cores busy"),
    "versions": (series({}, {"versions": {"moe-coord": "1"}}), "of different versions"),
    "failed": (series({}, {"error": "exit -9"}), "1 of 2 blocks failed"),
    "random": (series({"settings": {"model_names": ["synthetic-olmoe"]}}), "random weights"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(name: str) -> None:
    records, part = CASES[name]
    (line,) = warnings_of(records)
    assert part in line


def test_a_quiet_run_has_none() -> None:
    assert warnings_of(series(*QUIET)) == []
    assert warnings_of([]) == []


def test_the_rate_of_the_disk_while_it_was_awaited() -> None:
    assert disk_rate(block("a", 0, 10, **waiting(100))) == pytest.approx(2000)
    assert disk_rate(block("peer", 0, 10, report={})) is None
    hardly = waiting(100) | {"report": {"token_time": {"wait_disk_s": 0.005}}}
    assert disk_rate(block("a", 0, 10, **hardly)) is None
