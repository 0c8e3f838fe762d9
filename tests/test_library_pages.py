"""What read-ahead brought of libraries goes, what is mapped and what is no code stays."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from read_cases import opened, pattern, write_file

from coordinator.processes.library_pages import drop_unused_pages, executed_files
from io_worker.page_cache import cached_bytes

FILE_BYTES = 256 * 4096


@pytest.mark.parametrize("is_code", [True, False])
def test_only_pages_of_code_that_nobody_uses_go(tmp_path: Path, is_code: bool) -> None:
    path = write_file(tmp_path / "library.so", pattern(FILE_BYTES))
    with opened(path) as file:
        os.sync()
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(file.fd, 0, FILE_BYTES) != 0:
            pytest.skip("a file system that keeps its files in memory, or a kernel before 6.5")
        protection = mmap.PROT_READ | (mmap.PROT_EXEC if is_code else 0)
        with mmap.mmap(file.fd, 4096, mmap.MAP_SHARED, protection) as memory:
            assert memory[0] == pattern(1)[0]
            os.pread(file.fd, FILE_BYTES, 0)
            assert (str(path) in executed_files(os.getpid())) == is_code
            drop_unused_pages([os.getpid()])
            left = cached_bytes(file.fd, 0, FILE_BYTES)
        assert left is not None
        if is_code:
            assert 4096 <= left < FILE_BYTES // 2
        else:
            assert left == FILE_BYTES


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert executed_files(child.pid) == set()
    drop_unused_pages([child.pid])
