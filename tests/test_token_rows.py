"""`--csv`: a row per token, whatever the steps between."""

import csv
from pathlib import Path

import pytest

from coordinator.command.flag_values import ConfigError
from coordinator.command.token_rows import COLUMNS, TokenRows, Totals, create_rows
from coordinator.core.geometry import ExpertCounters
from coordinator.serving.tally import Tally
from shm.messages import Sampled, StepDone, StepTimes

MS = 1_000_000


def step(n_tokens: int, wall_ms: int, standing_uses: int = 0) -> StepDone:
    """A step that drew so many tokens and took so long, a tenth of it for the disk."""
    times = StepTimes(wall_ms * MS, wall_ms * MS * 9 // 10, wall_ms * MS // 10, 0, 2, 3)
    drawn = tuple(Sampled(1, token, 0.0) for token in range(n_tokens))
    return StepDone(1, drawn, times, standing_uses, (), False)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_steps_without_a_token_count_for_the_token_after_them(tmp_path: Path) -> None:
    totals = [Totals(0, 0, 0, 0), Totals(700, 5 * MS, 60, 10), Totals(900, 5 * MS, 76, 20)]
    rows = create_rows(tmp_path / "r.csv")
    rows.begin(4, lambda: totals.pop(0))
    for done in (step(0, 100), step(1, 50), step(1, 30, standing_uses=8)):
        rows.add_step(done)
    rows.close()
    first, second = rows_of(tmp_path / "r.csv")
    assert tuple(first) == COLUMNS
    assert first == {
        "request": "4", "token": "0", "wall_s": "0.150000", "compute_s": "0.135000",
        "read_s": "0.015000", "coordination_s": "0.000000", "madvise_s": "0.005000",
        "major_faults": "4", "bytes_read": "700", "requests": "60", "hits": "10",
    }  # fmt: skip
    assert second["token"] == "1"
    assert second["madvise_s"] == "0.000000"
    assert (second["bytes_read"], second["requests"], second["hits"]) == ("200", "24", "18")


def test_hits_that_nobody_knows_are_empty_and_requests_start_anew(tmp_path: Path) -> None:
    rows = create_rows(tmp_path / "r.csv")
    for request in (1, 2):
        rows.begin(request, lambda: Totals(0, 0, 0, None))
        rows.add_step(step(1, 10))
    rows.close()
    found = rows_of(tmp_path / "r.csv")
    assert [(row["request"], row["token"], row["hits"]) for row in found] == [
        ("1", "0", ""),
        ("2", "0", ""),
    ]


def test_whole_rows_are_there_while_it_is_written(tmp_path: Path) -> None:
    rows = create_rows(tmp_path / "r.csv")
    rows.begin(1, lambda: Totals(0, 0, 0, 0))
    rows.add_step(step(1, 10))
    assert len(rows_of(tmp_path / "r.csv")) == 1
    rows.close()


def test_a_disk_that_is_full_and_a_place_that_is_none(tmp_path: Path) -> None:
    rows: TokenRows = create_rows(Path("/dev/full"))
    rows.begin(1, lambda: Totals(0, 0, 0, 0))
    rows.add_step(step(1, 10))
    rows.close()
    assert rows.failure is not None
    with pytest.raises(ConfigError, match="--csv: expected a path that can be written"):
        create_rows(tmp_path)


def test_hits_of_the_first_decode_steps_are_counted_apart() -> None:
    tally, counters = Tally(n_prompt=3), ExpertCounters()
    for number in range(12):
        counters.requests += 100 if number == 0 else 10
        counters.hits += 0 if number == 0 else 6
        tally.add_token()
        tally.add_step(step(1, 1, standing_uses=1), counters)
    assert (tally.first_requests, tally.first_hits) == (8 * 11, 8 * 7)
