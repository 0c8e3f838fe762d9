import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from read_cases import opened, pattern, write_file
from worker_parent import WorkerParent

from io_worker.page_cache import WARMERS, CacheWarmer, cached_bytes, populate_refusal
from io_worker.read_queue import ReadQueue
from io_worker.reader import ModelFile, ReadError
from shm.messages import ReadFailed, ReadRange, ReadSlabs, SlabRead, SlabsReady, SlotLease
from shm.pool import ALIGNMENT, PoolLayout

FILE_BYTES = 100 * ALIGNMENT + 17
MAY_WAIT = 20.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf", pattern(FILE_BYTES))


@pytest.fixture
def cold(model: Path) -> Iterator[ModelFile]:
    """The file with nothing of it in the page cache."""
    with opened(model) as file:
        os.sync()  # only clean pages can be dropped
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(file.fd, 0, FILE_BYTES) != 0:
            pytest.skip("a file system that keeps its files in memory, or a kernel before 6.5")
        yield file


def slab(number: int, *offsets: int, n_bytes: int = 5 * ALIGNMENT) -> SlabRead:
    ranges = tuple(ReadRange(0, offset, n_bytes, 0) for offset in offsets)
    return SlabRead(SlotLease(number, 0), 2, number, ranges)


def test_what_is_cached_is_told_for_the_range_that_was_asked(cold: ModelFile) -> None:
    os.posix_fadvise(cold.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(cold.fd, 1, 10 * ALIGNMENT)
    assert cached_bytes(cold.fd, 0, FILE_BYTES) == ALIGNMENT
    assert cached_bytes(cold.fd, 10 * ALIGNMENT, 5) == ALIGNMENT
    assert cached_bytes(cold.fd, 0, 10 * ALIGNMENT) == 0
    assert cached_bytes(cold.fd, 0, 0) is None


@pytest.mark.parametrize("name", WARMERS)
@pytest.mark.parametrize(
    ("offset", "n_bytes"),
    [(0, 1), (4095, 2), (33 * ALIGNMENT + 5, 20_000), (FILE_BYTES - 30_000, 30_000)],
)
def test_all_pages_of_a_range_become_warm(
    cold: ModelFile, name: str, offset: int, n_bytes: int
) -> None:
    warmer = CacheWarmer([cold], name)
    outcome = warmer.read(ReadRange(0, offset, n_bytes, 0))
    first, last = offset // ALIGNMENT, (offset + n_bytes - 1) // ALIGNMENT
    n_pages = last - first + 1
    found = cached_bytes(cold.fd, first * ALIGNMENT, n_pages * ALIGNMENT)
    assert found == n_pages * ALIGNMENT
    assert outcome.bytes_read >= n_pages * ALIGNMENT - ALIGNMENT  # the last page may be a part
    assert warmer.read(ReadRange(0, offset, n_bytes, 0)).bytes_read == 0
    assert warmer.new_refusals() == []
    warmer.close()


@pytest.mark.parametrize("name", WARMERS)
@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_a_queue_without_a_pool_answers_every_slab(
    cold: ModelFile, name: str, n_threads: int
) -> None:
    warmer = CacheWarmer([cold], name)
    queue = ReadQueue(n_threads, warmer, None)
    good = [slab(number, number * ALIGNMENT, 200_000, 300_000) for number in range(20)]
    queue.submit([*good, slab(77, FILE_BYTES)])
    answers = []
    while len(answers) < len(good) + 1:
        assert select.select([queue.completion_fd], [], [], MAY_WAIT)[0]
        answers += queue.collect()
    (failed,) = [answer for answer in answers if isinstance(answer, ReadFailed)]
    assert failed.lease == SlotLease(77, 0)
    ready = [answer for answer in answers if isinstance(answer, SlabsReady)]
    assert {answer.lease for answer in ready} == {read.lease for read in good}
    assert all(0 < answer.start_ns <= answer.stop_ns for answer in ready)
    assert sum(answer.bytes_read for answer in ready) <= FILE_BYTES + ALIGNMENT, "read once"
    assert queue.close()
    warmer.close()


@pytest.mark.parametrize("name", ["willneed", "populate"])
def test_a_file_that_was_cut_is_a_changed_model(cold: ModelFile, model: Path, name: str) -> None:
    warmer = CacheWarmer([cold], name)
    os.truncate(model, 10 * ALIGNMENT)
    with pytest.raises(ReadError, match="model changed on disk") as caught:
        warmer.read(ReadRange(0, 50 * ALIGNMENT, 5 * ALIGNMENT, 0))
    assert caught.value.model_changed
    warmer.close()


def test_whether_pages_can_be_populated_is_tried(cold: ModelFile, model: Path) -> None:
    assert populate_refusal(cold) is None
    os.truncate(model, 0)
    refusal = populate_refusal(cold)
    assert refusal is not None and str(model) in refusal


@pytest.mark.parametrize("name", WARMERS)
def test_a_worker_without_a_pool_warms(cold: ModelFile, name: str) -> None:
    with WorkerParent([cold], PoolLayout(()), None, reader=name) as worker:
        worker.greet()
        (answer,) = worker.read(slab(5, 0, 100_000, 200_000))
        assert isinstance(answer, SlabsReady), answer
        assert cached_bytes(cold.fd, 100_000, 1) == ALIGNMENT
        assert worker.stop() == 0


def test_touching_a_file_that_was_cut_kills_the_worker_alone(cold: ModelFile, model: Path) -> None:
    with WorkerParent([cold], PoolLayout(()), None, reader="mmap") as worker:
        worker.greet()
        os.truncate(model, 10 * ALIGNMENT)
        worker.send(ReadSlabs((slab(1, 50 * ALIGNMENT),)))
        assert worker.wait() == -signal.SIGBUS


@pytest.mark.parametrize(("reader", "with_pool"), [("mmap", True), ("direct", False)])
def test_reader_and_pool_must_fit(cold: ModelFile, reader: str, with_pool: bool) -> None:
    layout = PoolLayout(())
    pool_fd = cold.fd if with_pool else None
    with WorkerParent([cold], layout, pool_fd, reader=reader) as worker:
        with pytest.raises(AssertionError, match=f"reader {reader} and the pool do not fit"):
            worker.greet()
        assert worker.wait() == 5
