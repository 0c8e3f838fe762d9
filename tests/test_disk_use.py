import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from read_cases import opened, pattern, write_file

from coordinator.processes.disk_use import DiskUse, DiskUseTotals, disk_use
from io_worker.page_cache import cached_bytes

FILE_BYTES = 64 * 4096


def test_sums_and_differences() -> None:
    a, b = DiskUse(10, 3, 7), DiskUse(4, 2, 1)
    assert a.plus(b) == DiskUse(14, 5, 8)
    assert a.minus(b) == DiskUse(6, 1, 6)
    assert a.minus(a) == DiskUse()


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert disk_use(child.pid) is None


def test_what_a_fault_fetches_is_counted_from_the_beginning_on(tmp_path: Path) -> None:
    with opened(write_file(tmp_path / "file", pattern(FILE_BYTES))) as file:
        os.sync()
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(file.fd, 0, FILE_BYTES) != 0:
            pytest.skip("a file system that keeps its files in memory, or a kernel before 6.5")
        totals = DiskUseTotals()
        assert totals.look() == DiskUse()
        totals.begin(os.getpid())
        before = totals.look()
        with mmap.mmap(file.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            assert len(bytes(memory[::4096])) == FILE_BYTES // 4096
        use = totals.look().minus(before)
        assert use.bytes_read >= FILE_BYTES
        assert use.major_faults >= 1


def test_a_dead_process_keeps_what_it_did() -> None:
    code = "import sys; bytearray(1 << 24); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        totals = DiskUseTotals()
        totals.begin(child.pid)
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        seen = totals.look()
        child.stdin.close()
        child.wait()
        assert totals.look().minor_faults >= seen.minor_faults > 0
