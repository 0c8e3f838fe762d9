"""How long a layer waits for its missing experts: ``python -P -m io_worker.burst_speed FILE``.

Reads bursts of 1, 2, 4, … experts from random places of the model, all ranges of a burst at once,
with the reader, queue and slots that the engine uses, and waits for each burst as a layer does. The
time of a burst, not bytes per second of an endless queue, is what a token pays. Prints one JSON
object: seconds per burst by its size, the mean of all that fit into the time.

With ``--packed-too`` every burst has one beside it that reads as many bytes from near the same
places as it would from a packed file (one range at a page for each expert), in the same time again.
Which of the two comes first is drawn: a throttled disk makes some wait for the others, in a rhythm
that no fixed order evens out.

``--pause-seconds`` is what the disk idles before a burst, as it does while a layer is computed: a
throttled disk saves up meanwhile, and one that sleeps takes its time to wake.
"""

import argparse
import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from io_worker.probe import choose_reader
from io_worker.read_queue import ReadQueue
from io_worker.reader import ModelFile, ModelFileError, close_files, open_files
from io_worker.slab_reader import SlabReader
from io_worker.slabs import LayerSlabs, SlabTable, slab_table
from shm.messages import ReadFailed, ReadRange, SlabRead, SlotLease
from shm.pool import (
    ALIGNMENT,
    PoolLayout,
    PoolMapping,
    SlotClass,
    align_up,
    create_pool,
)

EXIT_MODEL = 3
MIN_BURSTS = 4  # of each size, however slow the disk is

# layer, expert and windows of a slot -> what is read
Reads = Callable[[LayerSlabs, int, tuple[int, int, int]], tuple[ReadRange, ...]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of all bursts of one kind together, and of the pause before each."""

    seconds: float
    pause_seconds: float


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
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="before each burst")
    parser.add_argument("--packed-too", action="store_true", help="what a packed file would give")
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
    kinds: dict[str, Reads] = {"burst_s": LayerSlabs.reads_into}
    if options.packed_too and not slabs.is_packed:
        kinds["packed_burst_s"] = as_if_packed(files)
    limits = Limits(options.seconds, options.pause_seconds)
    seconds = measure(files, slabs, choice.name, options.depth, sizes, limits, kinds)
    close_files(files)
    print(json.dumps({"reader": choice.name, "reason": choice.reason, **seconds}))
    return 0


def as_if_packed(files: Sequence[ModelFile]) -> Reads:
    """Reads of one range at a page beside the expert's gate matrix, as long as a packed slab."""

    def reads(
        layer: LayerSlabs, expert: int, windows: tuple[int, int, int]
    ) -> tuple[ReadRange, ...]:
        gate = layer.gate.range_of(expert)
        file_bytes = files[gate.file].size_bytes
        n_bytes = min(sum(map(align_up, layer.range_bytes)), file_bytes)
        start = min(gate.offset, file_bytes - n_bytes) // ALIGNMENT * ALIGNMENT
        return (ReadRange(gate.file, start, n_bytes, windows[0]),)

    return reads


def measure(
    files: Sequence[ModelFile],
    slabs: SlabTable,
    reader: str,
    depth: int,
    sizes: Sequence[int],
    limits: Limits,
    kinds: Mapping[str, Reads],
) -> dict[str, dict[int, float]]:
    """Mean seconds of a burst of each size, of each kind, which take turns.

    Raises `RuntimeError` for a read that fails.
    """
    gate, up, down = (max(each) for each in zip(*(x.windows for x in slabs.layers), strict=True))
    layout = PoolLayout((SlotClass(max(sizes), (gate, up, down)),))
    fd = create_pool(layout)
    pool = PoolMapping(fd, layout, writable=True)
    queue = ReadQueue(depth, SlabReader(files, pool.view, reader, drop_cache=True), pool)
    experts = random_experts(slabs)
    burst(queue, pool, experts, max(sizes), LayerSlabs.reads_into)  # first use of the slots
    draw = random.Random(0)
    found: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for size in sizes:
        durations: dict[str, list[float]] = {kind: [] for kind in kinds}
        first, turns = durations["burst_s"], list(kinds.items())
        while len(first) < MIN_BURSTS or sum(first) < limits.seconds / len(sizes):
            draw.shuffle(turns)
            for kind, reads in turns:
                time.sleep(limits.pause_seconds)
                started = time.monotonic()
                burst(queue, pool, experts, size, reads)
                durations[kind].append(time.monotonic() - started)
        for kind, each in durations.items():
            found[kind][size] = sum(each) / len(each)
    if queue.close():
        pool.close()
    os.close(fd)
    return found


def burst(
    queue: ReadQueue,
    pool: PoolMapping,
    experts: Iterator[tuple[LayerSlabs, int]],
    size: int,
    reads_of: Reads,
) -> None:
    """Read so many experts at once and wait for the last."""
    reads = []
    for slot in range(size):
        layer, expert = next(experts)
        ranges = reads_of(layer, expert, pool.windows[slot])
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
