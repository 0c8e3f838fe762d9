"""How long a layer waits for its missing experts: ``python -P -m io_worker.burst_speed FILE``.

Reads bursts of 1, 2, 4, … experts from random places of the model, all ranges of a burst at once,
with the reader, queue and slots that the engine uses, and waits for each burst as a layer does. The
time of a burst, not bytes per second of an endless queue, is what a token pays. Prints one JSON
object: seconds per burst by its size, the mean of all that fit into the time.
"""

import argparse
import json
import os
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence

from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from io_worker.probe import choose_reader
from io_worker.read_queue import ReadQueue
from io_worker.reader import ModelFile, ModelFileError, close_files, open_files
from io_worker.slab_reader import SlabReader
from io_worker.slabs import LayerSlabs, SlabTable, slab_table
from shm.messages import ReadFailed, SlabRead, SlotLease
from shm.pool import (
    PoolLayout,
    PoolMapping,
    SlotClass,
    create_pool,
    window_bytes,
)

EXIT_MODEL = 3
MIN_BURSTS = 3  # of each size, however slow the disk is


def main() -> int:
    """Exit code: 0, or 3 for a model that cannot be used."""
    parser = argparse.ArgumentParser(prog="io_worker.burst_speed", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--sizes", default="1,2,4,8", help="experts of a burst")
    parser.add_argument("--depth", type=int, default=4, help="ranges read at once; 0: inline")
    parser.add_argument("--reader", default="direct")
    parser.add_argument("--seconds", type=float, default=2.0, help="for all sizes together")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    try:
        model = open_model(options.model)
        slabs = slab_table(model, range(options.layers), options.experts)
        files = open_files(model.paths)
    except (ModelFormatError, ModelFileError) as error:
        print(error, file=sys.stderr)
        return EXIT_MODEL
    choice = choose_reader(options.reader, files)
    seconds = measure(files, slabs, choice.name, options.depth, sizes, options.seconds)
    close_files(files)
    print(json.dumps({"reader": choice.name, "reason": choice.reason, "burst_s": seconds}))
    return 0


def measure(
    files: Sequence[ModelFile],
    slabs: SlabTable,
    reader: str,
    depth: int,
    sizes: Sequence[int],
    seconds: float,
) -> dict[int, float]:
    """Mean seconds of a burst of each size; raises `RuntimeError` for a read that fails."""
    largest = [
        max(sizes_of) for sizes_of in zip(*(x.range_bytes for x in slabs.layers), strict=True)
    ]
    gate, up, down = (window_bytes(n_bytes) for n_bytes in largest)
    layout = PoolLayout((SlotClass(max(sizes), (gate, up, down)),))
    fd = create_pool(layout)
    pool = PoolMapping(fd, layout, writable=True)
    queue = ReadQueue(depth, SlabReader(files, pool.view, reader, drop_cache=True), pool)
    experts = random_experts(slabs)
    burst(queue, pool, experts, max(sizes))  # first use of the slots
    found = {}
    for size in sizes:
        durations: list[float] = []
        while len(durations) < MIN_BURSTS or sum(durations) < seconds / len(sizes):
            started = time.monotonic()
            burst(queue, pool, experts, size)
            durations.append(time.monotonic() - started)
        found[size] = sum(durations) / len(durations)
    if queue.close():
        pool.close()
    os.close(fd)
    return found


def burst(
    queue: ReadQueue, pool: PoolMapping, experts: Iterator[tuple[LayerSlabs, int]], size: int
) -> None:
    """Read so many experts at once and wait for the last."""
    reads = []
    for slot in range(size):
        layer, expert = next(experts)
        ranges = layer.reads_into(expert, pool.windows[slot])
        reads.append(SlabRead(SlotLease(slot, 1), layer.layer, expert, ranges))
    queue.submit(reads)
    n_done = 0
    while n_done < size:
        select.select([queue.completion_fd], [], [])
        for answer in queue.collect():
            if isinstance(answer, ReadFailed):
                raise RuntimeError(answer.text)
            n_done += 1


def random_experts(slabs: SlabTable) -> Iterator[tuple[LayerSlabs, int]]:
    """Experts of any layer, a new order when all were read."""
    everything = [(layer, expert) for layer in slabs.layers for expert in range(slabs.n_experts)]
    draw = random.Random(0)
    while True:
        draw.shuffle(everything)
        yield from everything


if __name__ == "__main__":
    sys.exit(main())
