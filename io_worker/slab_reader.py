"""All model files behind one reader, chosen by name.

A reader is a row of `READERS`: a function that brings one range from a `FileSource` to its place in
the pool's `view`. Readers that only warm the page cache have rows of their own (`page_cache`);
`reader_named` gives either.

Several threads use one `SlabReader` at once. It knows no slots and no messages but `ReadRange`.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from io_worker.page_cache import CacheWarmer
from io_worker.reader import (
    FileSource,
    ModelFile,
    Preadv,
    ReadError,
    ReadOutcome,
    read_buffered,
    read_direct,
)
from shm.messages import ReadRange
from shm.pool import PoolMapping

ReadFunction = Callable[[FileSource, ReadRange, memoryview], ReadOutcome]
READERS: Mapping[str, ReadFunction] = {"direct": read_direct, "buffered": read_buffered}


class SlabReader:
    """All model files behind one reader."""

    def __init__(
        self,
        files: Sequence[ModelFile],
        view: memoryview,
        reader: str,
        *,
        drop_cache: bool = False,
        preadv: Preadv = os.preadv,
    ) -> None:
        self.sources = tuple(FileSource(f, drop_cache=drop_cache, preadv=preadv) for f in files)
        self._read = READERS[reader]
        self._view = view
        self._told: set[str] = set()

    def new_refusals(self) -> list[str]:
        """One line for each file that fell back to buffered since the last call."""
        if self._read is not read_direct:
            return []
        lines = [
            f"{source.file.path}: {source.direct_refusal}; reading it buffered"
            for source in self.sources
            if source.direct_refusal
        ]
        fresh = [line for line in lines if line not in self._told]
        self._told.update(fresh)
        return fresh

    def read(self, wanted: ReadRange) -> ReadOutcome:
        """Bring one checked range into the pool; raises `ReadError`."""
        source = self.sources[wanted.file]
        try:
            outcome = self._read(source, wanted, self._view)
        except ReadError as error:
            if not error.model_changed:
                source.check_now()  # a shrunken file is the better explanation
            raise
        source.check(time.monotonic_ns())
        return outcome


def reader_named(
    name: str, files: Sequence[ModelFile], pool: PoolMapping | None, *, drop_cache: bool
) -> SlabReader | CacheWarmer:
    """The reader of a name; without a pool it is one of `page_cache.WARMERS`."""
    if pool is None:
        return CacheWarmer(files, name)
    return SlabReader(files, pool.view, name, drop_cache=drop_cache)
