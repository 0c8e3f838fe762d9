"""Every way of reading against the same disk: random and sequential, for `disk_speed`.

Each reads whole places of one size, none of them twice, from a file whose pages were dropped
before: what comes is the disk's rate, with the way's own cost in it. `willneed` only asks, so its
pages are touched behind the call, as compute would do.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from io_worker.page_cache import WARMERS, cached_bytes
from io_worker.reader import ModelFile
from shm.huge_pages import pool_like_buffer
from shm.mapped_files import MappedFiles

Reads = list[tuple[float, int]]  # seconds since the start, bytes
ReadPlace = Callable[[int, int], int]  # offset and bytes asked for -> bytes that came
Way = contextlib.AbstractContextManager[ReadPlace]  # one per thread

ORDERS = ("random", "sequential")
DEPTHS = (1, 4)
# Of all threads together: reads into one place again and again end in the processor's cache, and
# were half as fast again as any that go through a pool
MEMORY_BYTES = 64 << 20


@contextlib.contextmanager
def _preadv(fd: int, n_bytes: int, depth: int) -> Iterator[ReadPlace]:
    n_buffers = max(1, MEMORY_BYTES // (depth * n_bytes))
    with pool_like_buffer(n_buffers * n_bytes) as buffer:  # aligned, as direct I/O wants it
        starts = itertools.cycle(range(0, len(buffer), n_bytes))

        def read(offset: int, n_bytes: int) -> int:
            into = next(starts)
            return os.preadv(fd, [buffer[into : into + n_bytes]], offset)

        yield read


def direct_reads(file: ModelFile, n_bytes: int, depth: int) -> Way:
    """Of one of `depth` threads, with O_DIRECT, which the file must allow."""
    assert file.direct_fd is not None
    return _preadv(file.direct_fd, n_bytes, depth)


def _buffered(file: ModelFile, n_bytes: int, depth: int) -> Way:
    return _preadv(file.fd, n_bytes, depth)


def _warmed(name: str) -> Callable[[ModelFile, int, int], Way]:
    @contextlib.contextmanager
    def make(file: ModelFile, n_bytes: int, depth: int) -> Iterator[ReadPlace]:
        mapping = MappedFiles([file.fd], [file.size_bytes])

        def read(offset: int, n_bytes: int) -> int:
            start = mapping.starts[0] + offset
            WARMERS[name](mapping, start, start + n_bytes)
            if name == "willneed":
                mapping.touch(start, start + n_bytes)
            return n_bytes

        try:
            yield read
        finally:
            mapping.close()  # mapped pages cannot be dropped for the next row

    return make


WAYS: Mapping[str, Callable[[ModelFile, int, int], Way]] = {
    "direct": direct_reads,
    "buffered": _buffered,
    **{name: _warmed(name) for name in WARMERS},
}


def ways_of(file: ModelFile) -> list[tuple[str, str, int]]:
    """Way, order and reads in flight of each row; without O_DIRECT one way less."""
    names = [name for name in WAYS if name != "direct" or file.direct_fd is not None]
    return [
        (name, order, depth)
        for name in names
        for order in ORDERS
        for depth in DEPTHS
        if name != "mmap" or depth == 1  # touching keeps the interpreter's lock
    ]


def read_file(
    file: ModelFile, way: str, order: str, read_bytes: int, depth: int, seconds: float
) -> Reads:
    """Read for so long, or until every place was read; raises `OSError` of a failed read."""
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    places = list(range(0, file.size_bytes - read_bytes + 1, read_bytes))
    if order == "random":
        random.Random(0).shuffle(places)
    reads: list[Reads] = [[] for _ in range(depth)]
    errors: list[OSError] = []
    start = time.monotonic()

    def work(number: int, mine: Iterator[int]) -> None:
        try:
            with WAYS[way](file, read_bytes, depth) as read:
                for offset in mine:
                    if time.monotonic() - start >= seconds or errors:
                        return
                    n_read = read(offset, read_bytes)
                    reads[number].append((time.monotonic() - start, n_read))
        except OSError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(number, iter(places[number::depth])))
        for number in range(depth)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sorted(read for each in reads for read in each)


def cached_share(file: ModelFile) -> float | None:
    """How much of the file is in the page cache now; None where the kernel does not tell."""
    found = cached_bytes(file.fd, 0, file.size_bytes)
    return None if found is None else min(1.0, found / max(1, file.size_bytes))
