from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from read_cases import (
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

from io_worker.reader import ReadError
from io_worker.slab_reader import READERS, SlabReader

DATA = pattern(100_000)
N_BYTES = 20_000


@pytest.mark.parametrize("reader", READERS)
def test_ranges_come_from_the_file_they_name(tmp_path: Path, reader: str) -> None:
    with ExitStack() as stack:
        contents = [DATA, DATA[::-1], DATA[5:]]
        files = [
            stack.enter_context(opened(write_file(tmp_path / f"part{index}", data)))
            for index, data in enumerate(contents)
        ]
        pool, _ = stack.enter_context(pool_of(1, *[N_BYTES] * 3))
        slab_reader = SlabReader(files, pool.view, reader)
        for index, data in enumerate(contents):
            wanted = range_at(pool.windows[0][index], 4097, N_BYTES)._replace(file=index)
            slab_reader.read(wanted)
            assert content(pool, wanted) == data[4097 : 4097 + N_BYTES]


def test_a_file_that_falls_back_is_told_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf", DATA)
    with opened(path) as file, pool_of(1, *[N_BYTES] * 3) as (pool, _):
        file = strict_direct(file)
        preadv = FaultyPreadv(file.direct_fd, Fault("EINVAL", 2))
        reader = SlabReader([file], pool.view, "direct", preadv=preadv)
        wanted = range_at(pool.windows[0][0], 100, N_BYTES)
        reader.read(wanted)
        assert reader.new_refusals() == []
        reader.read(wanted)
        (line,) = reader.new_refusals()
        assert line == f"{path}: O_DIRECT refused at a read (Invalid argument); reading it buffered"
        reader.read(wanted)
        assert reader.new_refusals() == []


def test_a_buffered_reader_has_nothing_to_tell(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf", DATA)
    with opened(path) as file, pool_of(1, *[N_BYTES] * 3) as (pool, _):
        without = replace(file, direct_fd=None, direct_refusal="O_DIRECT refused at open (why)")
        assert SlabReader([without], pool.view, "buffered").new_refusals() == []
        (line,) = SlabReader([without], pool.view, "direct").new_refusals()
        assert "O_DIRECT refused at open (why)" in line


@pytest.mark.parametrize("reader", READERS)
def test_an_error_on_a_file_that_was_written_to_is_a_changed_model(
    tmp_path: Path, reader: str
) -> None:
    path = write_file(tmp_path / "model.gguf", DATA)
    with opened(path) as file, pool_of(1, *[N_BYTES] * 3) as (pool, _):
        file = strict_direct(file)
        preadv = FaultyPreadv(file.direct_fd, Fault("EIO", 2, lasting=True))
        slab_reader = SlabReader([file], pool.view, reader, preadv=preadv)
        wanted = range_at(pool.windows[0][0], 100, N_BYTES)
        slab_reader.read(wanted)  # the identity is looked at, the next look is an interval away
        with pytest.raises(ReadError, match="Input/output error"):
            slab_reader.read(wanted)
        with path.open("r+b") as writer:
            writer.write(b"!")
        with pytest.raises(ReadError, match="model changed on disk") as caught:
            slab_reader.read(wanted)
        assert caught.value.model_changed
