"""Reads parts of dense tensors past the page cache, into any memory.

Through the page cache the dense weights would be paid for twice, and read-ahead would bring in
megabytes of the experts behind each tensor: under a memory limit that pushes against it. Direct
reads need aligned memory, so they go through a small aligned buffer. Where a file refuses direct
I/O it is read through the page cache, which is dropped after each part.

This module knows no models and no arrays, only tensors' places. One thread at a time.
"""

import mmap
import os
from collections.abc import Sequence

from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.reader import FileSource, ModelFile, ReadError, read_direct
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, window_bytes

PART_BYTES = 1024 * 1024  # of one read: larger ones are hardly faster, and the buffer stays


class TensorReader:
    """All model files, by file index."""

    def __init__(self, files: Sequence[ModelFile]) -> None:
        self._sources = [FileSource(file, drop_cache=True, preadv=os.preadv) for file in files]
        self._buffer = memoryview(mmap.mmap(-1, window_bytes(PART_BYTES), mmap.MAP_PRIVATE))

    def read(self, info: TensorInfo, start: int, target: memoryview) -> None:
        """Fill `target`, at most `PART_BYTES`, from byte `start` of a tensor.

        Raises `ModelFormatError` where the file ends early, `ReadError` for what the disk refuses.
        """
        offset = info.offset + start
        head = offset % ALIGNMENT
        source = self._sources[info.file]
        wanted = ReadRange(info.file, offset, len(target), head)
        try:
            read_direct(source, wanted, self._buffer)
        except ReadError as error:
            if not error.model_changed:
                raise ReadError(error.errno, f"{info.name}: {error}") from error
            text = f"expected {info.n_bytes} bytes, found the end of the file; it was cut"
            raise ModelFormatError(source.file.path, info.name, text, offset) from error
        target[:] = self._buffer[head : head + len(target)]
