"""Limits of disk and arithmetic: the sums, and one measurement of each kind."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute_worker.arch import resolve
from compute_worker.bus_speed import sum_with_numpy
from coordinator.bench.ceiling import (
    disk_timeout_seconds,
    limit_at,
    lines,
    run_ceiling,
    token_bytes,
)
from coordinator.bench.report.ceiling import ceiling_page
from coordinator.command.bench_commands import CeilingCommand
from coordinator.command.config import shipped_model
from coordinator.command.flag_values import ConfigError
from io_worker.disk_speed import DEPTHS, WAY_SHARE, rates, read_for, summary, throttles
from io_worker.disk_ways import ORDERS, WAYS, Reads, read_file, ways_of
from io_worker.model_file import open_model
from io_worker.reader import close_files, open_files

DISK = {
    "read_bytes": 1 << 20,
    "direct_refusal": "",
    "depths": [
        {"depth": 1, "gb_per_s": 0.5, "per_second": [0.5, 0.5], "throttles": False},
        {"depth": 4, "gb_per_s": 1.0, "per_second": [1.4, 0.6], "throttles": True},
    ],
}
BUS = {"reader": "numpy", "threads": 2, "gb_per_s": 20.0, "best_gb_per_s": 21.0}
RECORD: dict[str, Any] = {
    "model": "m", "slab_bytes": 1 << 20, "token_cycle_bytes": 400_000_000,
    "token_bytes": 500_000_000, "disk": DISK,
    "compute": {"bus": BUS, "tok_s": 30.0, "bus_share": 0.75},
}  # fmt: skip


@pytest.mark.parametrize(
    ("hit_rate", "limit"), [(0.0, 2.5), (0.5, 5.0), (0.9, 25.0), (0.95, 30.0), (1.0, 30.0)]
)
def test_the_slower_of_disk_and_compute(hit_rate: float, limit: float) -> None:
    assert limit_at(RECORD, hit_rate) == pytest.approx(limit)


def test_half_a_measurement_promises_nothing() -> None:
    only_disk = {key: value for key, value in RECORD.items() if key != "compute"}
    assert limit_at(only_disk, 0.5) is None
    assert not [line for line in lines(only_disk) if line.startswith("limit")]
    refused = RECORD | {"compute": {"bus": BUS, "refusal": "too small"}}
    assert limit_at(refused, 0.5) is None
    assert any("not measured: too small" in line for line in lines(refused))


@pytest.mark.parametrize("seconds", [1, 10, 3600])
def test_the_disk_may_take_what_was_asked_for(seconds: int) -> None:
    (file,) = files = open_files([str(shipped_model())])
    n_ways = len(ways_of(file))
    close_files(files)
    assert disk_timeout_seconds(seconds) > 600 + seconds * (len(DEPTHS) + WAY_SHARE * n_ways)


def test_what_is_printed() -> None:
    text = "\n".join(lines(RECORD))
    assert "4 in flight    1.00 GB/s   by second: 1.40 0.60  it throttles" in text
    assert "30.00 tokens/s, 75% of the memory bus" in text
    assert "20.0 GB/s, which allows 40.0 tokens/s" in text


@pytest.mark.parametrize(
    ("tok_s", "said"),
    [(30.0, "below a hit rate of 92% the disk is the limit"),
     (2.0, "compute is the limit even if every expert is read anew")],
)  # fmt: skip
def test_which_of_both_is_the_limit(tok_s: float, said: str) -> None:
    record = RECORD | {"compute": RECORD["compute"] | {"tok_s": tok_s}}
    assert lines(record)[-1] == f"the disk gives 1.00 GB/s, compute {tok_s:.2f} tokens/s: {said}"


def test_the_page_tells_every_line_once() -> None:
    page = ceiling_page(RECORD, lines(RECORD))
    assert page.headline == lines(RECORD)[-1]
    assert [page.headline, *page.sentences].count(page.headline) == 1
    assert len(page.sentences) == len(lines(RECORD)) - 1


def test_bytes_of_a_token_are_a_part_of_the_file() -> None:
    model = open_model(shipped_model())
    spec = resolve(model)
    assert 0 < spec.slabs.mean_slab_bytes < token_bytes(spec) < sum(model.file_bytes)


@pytest.mark.parametrize(
    ("per_second", "expected"),
    [
        ([10, 10, 10, 10], False),
        ([10, 10, 7, 7], True),
        ([7, 7, 10, 10], False),
        ([10, 1], False),
        ([], False),
    ],
)
def test_throttling(per_second: list[float], expected: bool) -> None:
    assert throttles(per_second) == expected


def test_rates_of_whole_seconds() -> None:
    reads: Reads = [(0.5, 10), (0.9, 10), (1.5, 7), (2.3, 100)]
    assert rates(reads) == [20, 7]
    assert summary(2, reads)["per_second"] == [0.0, 0.0]
    assert summary(2, [])["gb_per_s"] == 0.0


def test_reading_for_a_time(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    (file,) = files = open_files([path])
    try:
        if file.direct_fd is None:
            pytest.skip(file.direct_refusal)
        reads = read_for(file, 65536, depth=3, seconds=0.5)
    finally:
        close_files(files)
    assert reads == sorted(reads)
    assert all(n_bytes == 65536 for _, n_bytes in reads)
    assert 0.1 < reads[-1][0] < 20


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_numpy_sums_all_words(n_threads: int) -> None:
    assert sum_with_numpy(np.arange(1001, dtype=np.uint64), n_threads) == 500_500


def test_the_real_program(capsys: pytest.CaptureFixture[str]) -> None:
    command = CeilingCommand(shipped_model(), part="compute", compute_threads=1, json=True)
    assert run_ceiling(command) == 0
    said = capsys.readouterr()
    assert "measuring memory, and compute" in said.err  # it takes a while
    assert "measuring the disk" not in said.err
    record = json.loads(said.out)
    compute = record["compute"]
    assert compute["tok_s"] > 0
    assert 0 < compute["bus_share"] < 1.5
    assert compute["bus"]["gb_per_s"] > 0.1
    assert "disk" not in record


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_reads_every_place_once(tmp_path: Path, way: str, order: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    (file,) = files = open_files([path])
    try:
        if way == "direct" and file.direct_fd is None:
            pytest.skip(file.direct_refusal)
        reads = read_file(file, way, order, 65536, depth=2, seconds=30)
    finally:
        close_files(files)
    assert sum(n_bytes for _, n_bytes in reads) == 1 << 20


def test_what_is_kept(tmp_path: Path) -> None:
    """JSON, CSV, and with the extra the charts, of the disk of the shipped model."""
    pytest.importorskip("vl_convert", reason="needs the extra: pip install 'moe-coord[report]'")
    command = CeilingCommand(shipped_model(), part="disk", seconds=1, out=tmp_path)
    assert run_ceiling(command) == 0
    record = json.loads((tmp_path / "ceiling.json").read_text())
    ways = {(row["way"], row["order"]) for row in record["disk"]["ways"]}
    assert {(way, order) for way in WAYS if way != "direct" for order in ORDERS} <= ways
    assert (tmp_path / "ceiling.csv").read_text().startswith("way,order,reads_in_flight,gb_per_s")
    assert (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can be made"):
        run_ceiling(CeilingCommand(shipped_model(), out=tmp_path / "file" / "such"))
    (tmp_path / "answers.json").touch()
    with pytest.raises(ConfigError, match="without the results of `bench`"):
        run_ceiling(CeilingCommand(shipped_model(), out=tmp_path))
