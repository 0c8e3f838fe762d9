import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from read_cases import opened, pattern, write_file

from io_worker.reader import ModelFile
from shm.mapped_files import MappedFiles, file_starts
from shm.pool import ALIGNMENT, MADV_POPULATE_READ

CONTENTS = [pattern(ALIGNMENT + 1), pattern(1)[::-1], pattern(3 * ALIGNMENT)[::-1]]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[ModelFile]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(opened(write_file(tmp_path / f"part{number}", data)))
            for number, data in enumerate(CONTENTS)
        ]


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ((), (0,)),
        ((1,), (0, 4096)),
        ((4096, 1), (0, 4096, 8192)),
        ((4097, 1, 5), (0, 8192, 12288, 16384)),
    ],
)
def test_every_file_begins_at_a_page(sizes: tuple[int, ...], starts: tuple[int, ...]) -> None:
    assert file_starts(sizes) == starts


def test_files_lie_one_after_another(files: list[ModelFile]) -> None:
    mapped = MappedFiles([file.fd for file in files], [len(data) for data in CONTENTS])
    for data, start in zip(CONTENTS, mapped.starts, strict=False):
        assert mapped.view[start : start + len(data)] == data
    assert len(mapped.view) == mapped.n_bytes == mapped.starts[-1]
    with pytest.raises(TypeError):
        mapped.view[0] = 0
    mapped.touch(0, mapped.n_bytes)
    mapped.advise(0, mapped.n_bytes, MADV_POPULATE_READ)
    mapped.close()


def test_what_the_kernel_refuses_is_an_error(files: list[ModelFile]) -> None:
    mapped = MappedFiles([files[0].fd], [len(CONTENTS[0])])
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        mapped.advise(1, ALIGNMENT, MADV_POPULATE_READ)
    mapped.close()
    with pytest.raises(MemoryError, match="model files: cannot map 9223372036854771712 bytes: "):
        MappedFiles([files[0].fd], [2**63 - ALIGNMENT])
