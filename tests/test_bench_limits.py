"""What disk and cores would have allowed a block."""

from typing import Any

import pytest

from coordinator.bench.limits import shares
from coordinator.bench.table import table


def block(**changes: Any) -> dict[str, Any]:
    """10 tokens/s of 40 ms compute, half of it experts, and 50 MB at 1 GB/s."""
    times = {"compute_s": 0.04, "experts_s": 0.02, "wait_disk_s": 0.04, "coordination_s": 0.02}
    record = {
        "round": 0, "room": "r", "arm": "ours", "tok_s": 10.0, "prompt_tok_s": None,
        "bytes": {"per_token": 50_000_000}, "disk_bytes_per_second": 1e9,
        "memory": {"peak_bytes": 1, "limit_hits": 0}, "report": {"token_time": times},
    }  # fmt: skip
    return record | changes


@pytest.mark.parametrize(
    ("changes", "serial", "overlapped"),
    [
        ({}, 0.7, 0.5),
        ({"tok_s": 20.0}, 1.4, 1.0),  # reads hidden behind the dense part
        ({"disk_bytes_per_second": 5e9}, 0.3, 0.4),  # compute is the limit
        ({"bytes": {"per_token": None}}, 0.2, 0.4),
    ],
)
def test_shares(changes: dict[str, Any], serial: float, overlapped: float) -> None:
    found = shares(block(**changes))
    assert found == pytest.approx({"serial": serial, "overlapped": overlapped})


@pytest.mark.parametrize(
    "changes",
    [
        {"disk_bytes_per_second": None},  # a file system without O_DIRECT
        {"report": {}},  # a peer says nothing of itself
        {"error": "exit 5: died"},
        {"tok_s": None},  # a prompt only
    ],
)
def test_no_share_where_something_was_not_measured(changes: dict[str, Any]) -> None:
    assert shares(block(**changes)) is None


def test_the_table_has_them_where_they_were_asked_for() -> None:
    assert "serial limit" not in table([block(disk_bytes_per_second=None)], ["ours"], "ours")
    head, row, _ = table([block(), block(round=1, tok_s=20.0)], ["ours"], "ours").splitlines()
    assert head.split()[-6:] == ["of", "serial", "limit", "of", "overlapped", "limit"]
    assert row.split()[-2:] == ["1.05", "0.75"]
