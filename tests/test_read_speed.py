import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from read_cases import pattern, write_file

import io_worker
from io_worker.read_speed import GGUF_ALIGNMENT, random_places


@pytest.mark.parametrize("n_ranges", [1, 3])
def test_one_row_for_each_reader_size_and_depth(tmp_path: Path, n_ranges: int) -> None:
    path = write_file(tmp_path / "model.gguf", pattern(2_000_000))
    arguments = [
        str(path),
        "--slab-bytes",
        "100000,300000",
        "--depths",
        "1,3",
        "--gigabytes",
        "0.001",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "io_worker.read_speed", *arguments, "--ranges", str(n_ranges)],
        env={**os.environ, "PYTHONPATH": str(Path(io_worker.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    _, *rows = done.stdout.splitlines()
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        _, slab_mib, ranges, depth, speed, cpu, over_read = row.split()
        assert float(slab_mib) > 0 and int(depth) in (1, 3) and int(ranges) == n_ranges
        assert float(speed) > 0 and float(cpu) >= 0 and over_read.endswith("%")


def test_a_file_that_is_not_there_is_exit_3(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "io_worker.read_speed", tmp_path / "missing"],
        env={**os.environ, "PYTHONPATH": str(Path(io_worker.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "No such file" in done.stderr and done.stderr.count("\n") == 1


def test_places_are_aligned_inside_and_not_repeated() -> None:
    file_bytes, range_bytes = 1_000_000, 30_001
    n_places = (file_bytes - range_bytes - 1) // (range_bytes + 31) + 1
    places = list(islice(random_places(file_bytes, range_bytes), n_places))
    assert len(set(places)) == n_places
    assert all(place % GGUF_ALIGNMENT == 0 for place in places)
    assert all(place + range_bytes <= file_bytes for place in places)
