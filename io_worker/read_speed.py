"""How fast the reader alone is: ``python -m io_worker.read_speed FILE``.

Reads slabs from random places of a file into a pool, for each reader, slab size and depth, and
prints GB/s and CPU seconds per GB. Nothing else runs in the process: what is missing to `fio` at
the same size and depth is the reader's own cost.

A figure is taken in steady state: every slot was written once before. Before each row the file's
pages are dropped, and no place is read twice within a row, so buffered reads come from the disk.
"""

import argparse
import os
import random
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from io_worker.probe import choose_reader
from io_worker.read_queue import ReadQueue
from io_worker.reader import ModelFile, ModelFileError, close_files, open_files
from io_worker.slab_reader import SlabReader
from shm.messages import ReadFailed, ReadRange, SlabRead, SlotLease
from shm.pool import ALIGNMENT, PoolLayout, PoolMapping, SlotClass, create_pool, window_bytes

MiB = 1 << 20
GGUF_ALIGNMENT = 32
SLAB_BYTES = (int(1.1 * MiB), int(3.6 * MiB))
DEPTHS = (1, 2, 4, 8)
SLABS_AHEAD = 4  # queued behind those that are being read, like the coordinator's credit


@dataclass(frozen=True, slots=True)
class Speed:
    """One row: `cpu_seconds` of this process, `wall_seconds`, and the slab bytes they brought."""

    slab_bytes: int
    over_read_bytes: int
    wall_seconds: float
    cpu_seconds: float


def main() -> int:
    """Exit code: 0, or 3 for a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="io_worker.read_speed", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--readers", default="direct,buffered")
    parser.add_argument("--slab-bytes", default=",".join(map(str, SLAB_BYTES)))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--ranges", type=int, choices=(1, 3), default=3, help="ranges of a slab")
    parser.add_argument(
        "--alignment", type=int, default=GGUF_ALIGNMENT, help="of places in the file; packed: 4096"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="read for each row")
    parser.add_argument("--drop-cache", action="store_true", help="drop buffered pages at once")
    options = parser.parse_args()
    try:
        (file,) = files = open_files([options.file])
    except ModelFileError as error:
        print(error, file=sys.stderr)
        return 3
    print("reader     slab MiB  ranges  depth   GB/s  CPU s/GB  over-read")
    for name in options.readers.split(","):
        choice = choose_reader(name, files)
        for slab_bytes in map(int, options.slab_bytes.split(",")):
            for depth in map(int, options.depths.split(",")):
                speed = measure(
                    file,
                    choice.name,
                    range_bytes=slab_bytes // options.ranges,
                    n_ranges=options.ranges,
                    alignment=options.alignment,
                    depth=depth,
                    n_slabs=max(1, int(options.gigabytes * 1e9 / slab_bytes)),
                    drop_cache=options.drop_cache,
                )
                print(
                    f"{choice.name:<10} {slab_bytes / MiB:8.2f} {options.ranges:7} {depth:6} "
                    f"{speed.slab_bytes / speed.wall_seconds / 1e9:6.2f} "
                    f"{speed.cpu_seconds / speed.slab_bytes * 1e9:9.3f} "
                    f"{speed.over_read_bytes / speed.slab_bytes:9.2%}",
                    flush=True,
                )
    close_files(files)
    return 0


def measure(
    file: ModelFile,
    reader: str,
    *,
    range_bytes: int,
    n_ranges: int,
    alignment: int,
    depth: int,
    n_slabs: int,
    drop_cache: bool,
) -> Speed:
    """Read `n_slabs` slabs of `n_ranges` ranges with `depth` threads; raises `RuntimeError`."""
    n_slots = depth + SLABS_AHEAD
    windows = (window_bytes(range_bytes),) * 3 if n_ranges == 3 else packed_windows(range_bytes)
    layout = PoolLayout((SlotClass(n_slots, windows),))
    pool_fd = create_pool(layout)
    pool = PoolMapping(pool_fd, layout, writable=True)
    queue = ReadQueue(depth, SlabReader([file], pool.view, reader, drop_cache=drop_cache), pool)
    places = random_places(file.size_bytes, range_bytes, alignment)
    drop_pages(file)
    run(queue, pool, places, n_ranges, range_bytes, n_slots)
    start, cpu_start = time.perf_counter(), time.process_time()
    speed_bytes, over_read_bytes = run(queue, pool, places, n_ranges, range_bytes, n_slabs)
    speed = Speed(
        speed_bytes,
        over_read_bytes,
        time.perf_counter() - start,
        time.process_time() - cpu_start,
    )
    if queue.close():
        pool.close()
    os.close(pool_fd)
    return speed


def run(
    queue: ReadQueue,
    pool: PoolMapping,
    places: Iterator[int],
    n_ranges: int,
    range_bytes: int,
    n_slabs: int,
) -> tuple[int, int]:
    """Read `n_slabs` slabs through all slots in turn; returns slab bytes and bytes over-read."""
    free = list(range(pool.layout.n_slots))
    n_ordered = n_done = n_bytes = n_over_read = 0
    while n_done < n_slabs:
        while free and n_ordered < n_slabs:
            slot = free.pop()
            ranges = tuple(
                ReadRange(0, place, range_bytes, window + place % ALIGNMENT)
                for window, place in zip(pool.windows[slot][:n_ranges], places, strict=False)
            )
            queue.submit([SlabRead(SlotLease(slot, n_ordered), 0, slot, ranges)])
            n_ordered += 1
        select.select([queue.completion_fd], [], [])
        for answer in queue.collect():
            if isinstance(answer, ReadFailed):
                raise RuntimeError(answer.text)
            free.append(answer.lease.slot)
            n_done += 1
            n_bytes += answer.bytes_read
            n_over_read += answer.bytes_over_read
    return n_bytes, n_over_read


def packed_windows(slab_bytes: int) -> tuple[int, int, int]:
    """A slot for one range: its whole window, cut anywhere at a page."""
    return window_bytes(slab_bytes) - 2 * ALIGNMENT, ALIGNMENT, ALIGNMENT


def random_places(
    file_bytes: int, range_bytes: int, alignment: int = GGUF_ALIGNMENT
) -> Iterator[int]:
    """Aligned starts of ranges all over the file; starts again when all are used."""
    stride = -(-range_bytes // alignment) * alignment
    places = list(range(alignment, file_bytes - range_bytes, stride))
    draw = random.Random(0)
    while True:
        draw.shuffle(places)
        yield from places


def drop_pages(file: ModelFile) -> None:
    """Let go of the file's clean pages, those that are mapped nowhere."""
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
