import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_builder import tiny_model
from read_cases import opened

from compute_worker.arch import resolve
from io_worker.model_file import open_model
from io_worker.page_cache import cached_bytes
from io_worker.reader import ModelFile, ReadError
from io_worker.reader_trial import Workload, bytes_per_second
from io_worker.slab_reader import READERS
from io_worker.slabs import SlabTable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4)


@pytest.fixture
def cold(model: Path) -> Iterator[tuple[ModelFile, SlabTable]]:
    """The file with nothing of its experts in the page cache."""
    slabs = resolve(open_model(model)).slabs
    with opened(model) as file:
        os.sync()
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(file.fd, 0, file.size_bytes) != 0:
            pytest.skip("a file system that keeps its files in memory, or a kernel before 6.5")
        yield file, slabs


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("n_at_once", [1, 3])
def test_a_trial_measures_and_leaves_nothing(
    cold: tuple[ModelFile, SlabTable], name: str, n_at_once: int
) -> None:
    file, slabs = cold
    n_threads = threading.active_count()
    assert bytes_per_second(name, [file], Workload(slabs, n_at_once, 0), 0.05) > 0
    assert threading.active_count() == n_threads
    # a page that two threads read at the same time is not let go
    assert (cached_bytes(file.fd, 0, file.size_bytes) or 0) <= (n_at_once - 1) * file.size_bytes / 4


def test_a_file_that_is_all_in_memory_gives_nothing_to_try(
    cold: tuple[ModelFile, SlabTable],
) -> None:
    file, slabs = cold
    os.pread(file.fd, file.size_bytes, 0)
    assert bytes_per_second("buffered", [file], Workload(slabs, 2, 0), 0.05) == 0


def test_a_read_that_fails_ends_the_trial(
    cold: tuple[ModelFile, SlabTable], tmp_path: Path
) -> None:
    _, slabs = cold
    short = tmp_path / "short.gguf"
    short.write_bytes(b"no experts here")
    with opened(short) as file, pytest.raises(ReadError, match="model changed on disk"):
        bytes_per_second("buffered", [file], Workload(slabs, 2, 0), 0.05)
