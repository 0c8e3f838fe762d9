import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from read_cases import (
    GUARD,
    Fault,
    FaultyPreadv,
    content,
    opened,
    pattern,
    pool_of,
    range_at,
    strict_direct,
    write_file,
)

from io_worker.page_cache import cached_bytes
from io_worker.reader import (
    CHECK_INTERVAL_NS,
    FileSource,
    ModelFile,
    ModelFileError,
    ReadError,
    change_of,
    close_files,
    descriptors,
    open_files,
    read_buffered,
    read_direct,
)
from shm.pool import ALIGNMENT

FILE_BYTES = 300_017  # not a multiple of 512
DATA = pattern(FILE_BYTES)
READ = {"direct": read_direct, "buffered": read_buffered}
OFFSETS = (0, 1, 32, 4064, 4095, 4096, 5000, 131_072)
SIZES = (1, 31, 4095, 4096, 4097, 8192, 100_003)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf", DATA)


def ranges_to_try() -> list[tuple[int, int]]:
    inside = [(offset, n) for offset in OFFSETS for n in SIZES]
    at_the_end = [(FILE_BYTES - n, n) for n in SIZES]
    return inside + at_the_end


@pytest.mark.parametrize("reader", READ)
@pytest.mark.parametrize("is_strict", [False, True], ids=["as it is", "strict alignment"])
def test_bytes_land_where_they_belong(model: Path, reader: str, is_strict: bool) -> None:
    with opened(model) as file, pool_of(3, *[max(SIZES)] * 3) as (pool, _):
        file = strict_direct(file) if is_strict else file
        preadv = FaultyPreadv(file.direct_fd if is_strict else None)
        source = FileSource(file, drop_cache=False, preadv=preadv)
        slot = 1
        window = pool.windows[slot][1]
        for offset, n_bytes in ranges_to_try():
            wanted = range_at(window, offset, n_bytes)
            outcome = READ[reader](source, wanted, pool.view)
            assert content(pool, wanted) == DATA[offset : offset + n_bytes], (offset, n_bytes)
            assert outcome.bytes_read == n_bytes
            assert 0 <= outcome.bytes_over_read <= 2 * ALIGNMENT
        assert source.direct_refusal == file.direct_refusal
        window_stop = pool.windows[slot][2]
        before, after = pool.view[pool.layout.header_bytes : window], pool.view[window_stop:]
        assert set(before) == set(after) == {GUARD}, "bytes outside the window were touched"


def test_direct_reads_the_aligned_units_and_nothing_else(model: Path) -> None:
    with opened(model) as file, pool_of(1, *[10_000] * 3) as (pool, _):
        file = strict_direct(file)
        preadv = FaultyPreadv(file.direct_fd)
        source = FileSource(file, drop_cache=False, preadv=preadv)
        outcome = read_direct(source, range_at(pool.windows[0][0], 4000, 5000), pool.view)
        assert (outcome.bytes_read, outcome.bytes_over_read) == (5000, 3 * ALIGNMENT - 5000)
        assert preadv.n_calls == 1


@pytest.mark.parametrize("kind", ["EINVAL", "EFAULT", "EOPNOTSUPP"])
def test_a_refusal_at_any_read_falls_back_and_is_remembered(model: Path, kind: str) -> None:
    for first in (1, 2, 3):
        with opened(model) as file, pool_of(1, *[50_000] * 3) as (pool, _):
            file = strict_direct(file)
            preadv = FaultyPreadv(file.direct_fd, Fault(kind, first))
            source = FileSource(file, drop_cache=False, preadv=preadv)
            for index in range(3):
                wanted = range_at(pool.windows[0][index], 77 + index, 50_000)
                read_direct(source, wanted, pool.view)
                start = wanted.file_offset
                assert content(pool, wanted) == DATA[start : start + 50_000]
            assert "refused at a read" in source.direct_refusal
            assert preadv.n_calls == 4, "one refused read more than three, no second try"


@pytest.mark.parametrize("reader", READ)
@pytest.mark.parametrize("kind", ["half", "one byte"])
def test_short_reads_go_on(model: Path, reader: str, kind: str) -> None:
    n_bytes = 20_000
    for lasting in (False, True):
        for first in (1, 2, 3, 4):
            with opened(model) as file, pool_of(1, *[n_bytes] * 3) as (pool, _):
                file = strict_direct(file)
                preadv = FaultyPreadv(file.direct_fd, Fault(kind, first, lasting))
                source = FileSource(file, drop_cache=False, preadv=preadv)
                for offset in (0, 4095, FILE_BYTES - n_bytes):
                    wanted = range_at(pool.windows[0][0], offset, n_bytes)
                    outcome = READ[reader](source, wanted, pool.view)
                    assert content(pool, wanted) == DATA[offset : offset + n_bytes]
                    assert outcome.bytes_read == n_bytes
                assert preadv.n_calls <= 3 * (n_bytes + 2), "no read without progress"
                assert not source.direct_refusal


@pytest.mark.parametrize("reader", READ)
def test_one_io_error_is_tried_again_and_two_fail_with_the_offset(model: Path, reader: str) -> None:
    for lasting in (False, True):
        with opened(model) as file, pool_of(1, *[9_000] * 3) as (pool, _):
            file = strict_direct(file)
            preadv = FaultyPreadv(file.direct_fd, Fault("EIO", 1, lasting))
            source = FileSource(file, drop_cache=False, preadv=preadv)
            wanted = range_at(pool.windows[0][0], 8192, 9_000)
            if not lasting:
                READ[reader](source, wanted, pool.view)
                assert content(pool, wanted) == DATA[8192 : 8192 + 9_000]
                continue
            with pytest.raises(ReadError, match="at byte 8192: Input/output error") as caught:
                READ[reader](source, wanted, pool.view)
            assert (caught.value.errno, caught.value.model_changed) == (5, False)
            assert preadv.n_calls == 2


@pytest.mark.parametrize("reader", READ)
def test_a_truncated_file_is_a_changed_model(model: Path, reader: str) -> None:
    for new_size in (0, 4096, 60_001):
        write_file(model, DATA)
        with opened(model) as file, pool_of(1, *[50_000] * 3) as (pool, _):
            os.truncate(model, new_size)
            source = FileSource(file, drop_cache=False, preadv=os.preadv)
            with pytest.raises(ReadError, match="model changed on disk") as caught:
                READ[reader](source, range_at(pool.windows[0][0], 50_000, 50_000), pool.view)
            assert caught.value.model_changed
            with pytest.raises(ReadError):
                source.check(0)


def test_the_identity_is_looked_at_once_per_interval(model: Path) -> None:
    with opened(model) as file:
        source = FileSource(file, drop_cache=False, preadv=os.preadv)
        source.check(1)
        with model.open("r+b") as writer:
            writer.write(b"!")
        source.check(CHECK_INTERVAL_NS)
        with pytest.raises(ReadError, match="modification time") as caught:
            source.check(CHECK_INTERVAL_NS + 1)
        assert caught.value.model_changed
        with pytest.raises(ReadError):
            source.check(CHECK_INTERVAL_NS + 2)  # known now, whatever the clock says


def test_no_thread_passes_while_another_looks_at_the_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_looking, may_go_on = threading.Event(), threading.Event()

    def slow_change_of(file: ModelFile) -> str | None:
        is_looking.set()
        may_go_on.wait(20)
        return change_of(file)

    with opened(model) as file:
        with model.open("r+b") as writer:
            writer.write(b"!")
        source = FileSource(file, drop_cache=False, preadv=os.preadv)
        with ThreadPoolExecutor(2) as threads:
            monkeypatch.setattr("io_worker.reader.change_of", slow_change_of)
            first = threads.submit(source.check, 1)
            assert is_looking.wait(20)
            second = threads.submit(source.check, 2)
            with suppress(TimeoutError):
                second.result(0.05)  # passes only if it does not look for itself
            may_go_on.set()
            for check in (first, second):
                with pytest.raises(ReadError, match="model changed on disk"):
                    check.result(20)


@pytest.mark.parametrize("drop_cache", [False, True])
@pytest.mark.parametrize("kernel", ["this one", "an old one"])
def test_dropping_the_cache_gives_the_same_bytes(
    model: Path, drop_cache: bool, kernel: str
) -> None:
    with opened(model) as file, pool_of(1, *[50_000] * 3) as (pool, _):
        os.sync()  # only clean pages can be dropped
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(file.fd, 0, FILE_BYTES) != 0:
            pytest.skip("a file system that keeps its files in memory, or a kernel before 6.5")
        old = FaultyPreadv(None)
        preadv = os.preadv if kernel == "this one" else old
        source = FileSource(file, drop_cache=drop_cache, preadv=preadv)
        for offset in (123, 100_000):
            wanted = range_at(pool.windows[0][0], offset, 50_000)
            read_buffered(source, wanted, pool.view)
            assert content(pool, wanted) == DATA[offset : offset + 50_000]
            found = cached_bytes(file.fd, offset, 50_000)
            assert found == 0 if drop_cache else found
        assert old.n_refused == (drop_cache and kernel == "an old one"), "asked once per file"


def open_names() -> list[str]:
    """What the descriptors of this process name; the one of the listing itself is gone again."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(str(link.readlink()))
    return names


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".other"))


def replace_by_another(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(b"another file")
    other.replace(path)


def forbid(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize("change", [rename, replace_by_another, Path.unlink, forbid])
def test_what_happens_to_the_path_does_not_matter(model: Path, change) -> None:  # type: ignore[no-untyped-def]
    with opened(model) as file:
        change(model)
        assert change_of(file) is None
        assert os.pread(file.fd, 100, 1000) == DATA[1000:1100]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "regular file"),
        (lambda path: os.mkfifo(path), "regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "regular file"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
    ids=["missing", "directory", "fifo", "device", "loop"],
)
def test_what_cannot_be_opened_is_named(tmp_path: Path, model: Path, make, problem) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "odd"
    make(path)
    with pytest.raises(ModelFileError, match=problem) as caught:
        open_files([model, path])
    assert str(path) in str(caught.value)
    assert not [name for name in open_names() if str(tmp_path) in name], "left open"


def test_a_name_that_is_not_utf8_can_be_told(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/mod\xffel"
    Path(os.fsdecode(path)).write_bytes(b"x")
    files = open_files([os.fsdecode(path)])
    assert files[0].path.encode("utf-8").endswith(b"mod\\xffel")
    assert len(descriptors(files)) in (1, 2)
    close_files(files)
