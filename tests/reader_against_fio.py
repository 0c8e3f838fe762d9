"""The reader alone beside fio at the same size and depth: ``python tests/reader_against_fio.py F``.

Three take turns (A B C C B A), since disks swing by a third within minutes, and ratios are of
neighbours:

reader   `ReadQueue` with so many threads, slabs of three ranges, into slots of a pool
bare     as many threads that do nothing but `preadv`, at places and to windows like the reader's
fio      (Debian package `fio`) whole aligned blocks as long as one range, as many in flight

What a direct read costs depends on the memory that it goes to as much as on the disk. fio gets
memory that was made like the pool; with ``--fio-memory own`` it takes its own, of small pages. It
reads into the same one block per read in flight again and again, which stays in the processor's
cache at depth 1 and 2, where the others fill one slot after the other. So `bare` is the like of the
reader there, and what is missing to it is what the reader costs. Prints a line per size and depth:
medians of GB/s, and of the reader's ratios with the smallest and the largest.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from io_worker.read_speed import SLABS_AHEAD, measure, random_places
from io_worker.reader import ModelFile, open_files
from shm.huge_pages import HUGE_PAGE_BYTES
from shm.pool import (
    ALIGNMENT,
    PoolLayout,
    PoolMapping,
    SlotClass,
    align_up,
    create_pool,
    window_bytes,
)

MiB = 1 << 20
SLAB_BYTES = (3_538_944, int(1.1 * MiB))  # an expert of OLMoE in Q4_K, and a small one
DEPTHS = (1, 2, 4, 8)
N_RANGES = 3
GGUF_ALIGNMENT = 32


def reader_speed(file: ModelFile, slab_bytes: int, depth: int, n_bytes: int) -> float:
    """Slab bytes per second of the reader alone."""
    speed = measure(
        file,
        "direct",
        range_bytes=slab_bytes // N_RANGES,
        n_ranges=N_RANGES,
        alignment=GGUF_ALIGNMENT,
        depth=depth,
        n_slabs=max(1, n_bytes // slab_bytes),
        drop_cache=False,
    )
    return speed.slab_bytes / speed.wall_seconds


def bare_speed(file: ModelFile, slab_bytes: int, depth: int, n_bytes: int) -> float:
    """Bytes per second of threads that only read."""
    range_bytes = slab_bytes // N_RANGES
    window = window_bytes(range_bytes)
    layout = PoolLayout((SlotClass(depth + SLABS_AHEAD, (window, window, window)),))
    pool_fd = create_pool(layout)
    pool = PoolMapping(pool_fd, layout, writable=True)
    pool.populate(writable=True)
    places = random_places(file.size_bytes - ALIGNMENT, range_bytes)
    targets = itertools.cycle(start for starts in pool.windows for start in starts)
    n_reads = n_bytes // range_bytes
    reads = [
        (place - place % ALIGNMENT, start)
        for place, start, _ in zip(places, targets, range(n_reads), strict=False)
    ]

    def read(share: list[tuple[int, int]]) -> None:
        for place, start in share:
            with pool.view[start : start + window] as target:
                os.preadv(file.direct_fd or file.fd, [target], place)

    threads = [threading.Thread(target=read, args=(reads[n::depth],)) for n in range(depth)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    pool.close()
    os.close(pool_fd)
    return n_reads * range_bytes / seconds


def fio_speed(path: Path, block_bytes: int, depth: int, n_bytes: int, memory: str) -> float:
    """Bytes per second of fio; `memory` is its ``--mem``."""
    command = [
        "fio", "--name=reader", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1",
        "--ioengine=libaio", f"--iodepth={depth}", f"--bs={block_bytes}", f"--io_size={n_bytes}",
        f"--mem={memory}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["jobs"][0]["read"]
    return float(found["bw_bytes"])


@contextlib.contextmanager
def memory_like_the_pool(n_bytes: int) -> Iterator[str]:
    """The ``--mem`` of fio for so many bytes, from a boundary of a huge page on."""
    windows = (align_up(max(n_bytes, HUGE_PAGE_BYTES)), ALIGNMENT, HUGE_PAGE_BYTES)
    fd = create_pool(PoolLayout((SlotClass(1, windows),)))
    try:
        yield f"mmapshared:/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=4, help="each has two of both")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--slab-bytes", default=",".join(map(str, SLAB_BYTES)))
    parser.add_argument("--fio-memory", choices=("pool", "own"), default="pool")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    options = parser.parse_args()
    (file,) = open_files([options.file])
    n_bytes = int(options.gigabytes * 1e9)
    print("slab MiB  depth  GB/s: reader  bare   fio  reader/bare [least, most]  reader/fio")
    for slab_bytes in map(int, options.slab_bytes.split(",")):
        block_bytes = align_up(slab_bytes // N_RANGES)
        for depth in map(int, options.depths.split(",")):
            with memory_like_the_pool(block_bytes * (depth + 1)) as like_the_pool:
                memory = like_the_pool if options.fio_memory == "pool" else "malloc"
                measures = [
                    functools.partial(reader_speed, file, slab_bytes, depth, n_bytes),
                    functools.partial(bare_speed, file, slab_bytes, depth, n_bytes),
                    functools.partial(fio_speed, options.file, block_bytes, depth, n_bytes, memory),
                ]
                rows = []
                for _ in range(options.rounds):
                    rows.append([measure() for measure in measures])
                    rows.append([measure() for measure in reversed(measures)][::-1])
            speeds = [median(row) / 1e9 for row in zip(*rows, strict=True)]
            bare, fio = (sorted(row[0] / row[other] for row in rows) for other in (1, 2))
            print(
                f"{slab_bytes / MiB:8.2f} {depth:6} {speeds[0]:13.2f} {speeds[1]:5.2f} "
                f"{speeds[2]:5.2f} {median(bare):12.2f} [{bare[0]:.2f}, {bare[-1]:.2f}] "
                f"{median(fio):8.2f} [{fio[0]:.2f}, {fio[-1]:.2f}]",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
