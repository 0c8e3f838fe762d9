"""How fast memory is read: ``python -P -m compute_worker.bus_speed --threads N``.

Sums a buffer much larger than any cache, in the memory that weights lie in (a memfd with 4 KiB
pages), with the threads and the widest loads that the kernels use: the limit of every token.
Without native kernels numpy reads, one thread per part. Prints one JSON object.
"""

import argparse
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from compute_worker.native_kernels import Engine, runnable_instruction_sets, unavailable_reason

Buffer = npt.NDArray[np.uint64]
BUFFER_BYTES = 1 << 30
N_PASSES = 8


def main() -> int:
    """Exit code: 0."""
    parser = argparse.ArgumentParser(prog="compute_worker.bus_speed", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bytes", type=int, default=BUFFER_BYTES)
    options = parser.parse_args()
    fd = os.memfd_create("bus_speed", os.MFD_CLOEXEC)
    os.ftruncate(fd, options.bytes)
    with mmap.mmap(fd, options.bytes) as mapping:
        data = np.frombuffer(mapping, np.uint64)
        data[:] = 1
        name, read = reader(options.threads)
        seconds = []
        for _ in range(N_PASSES):
            start = time.perf_counter()
            total = read(data)
            seconds.append(time.perf_counter() - start)
            assert total == len(data)
        del data
    rates = sorted(options.bytes / each / 1e9 for each in seconds)
    record = {
        "reader": name,
        "threads": options.threads,
        "gb_per_s": round(rates[len(rates) // 2], 2),
        "best_gb_per_s": round(rates[-1], 2),
    }
    print(json.dumps(record))
    return 0


def reader(n_threads: int) -> tuple[str, Callable[[Buffer], int]]:
    """A function that sums a buffer with so many threads, and its name."""
    if unavailable_reason() is None:
        instruction_set = runnable_instruction_sets()[0]
        return instruction_set, Engine(instruction_set, "fast", n_threads).read_all
    return "numpy", lambda data: sum_with_numpy(data, n_threads)


def sum_with_numpy(data: Buffer, n_threads: int) -> int:
    """Sum of all words; numpy lets other threads run meanwhile."""
    sums = [0] * n_threads

    def work(number: int, part: Buffer) -> None:
        sums[number] = int(np.add.reduce(part))

    parts = np.array_split(data, n_threads)
    threads = [threading.Thread(target=work, args=each) for each in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sums)


if __name__ == "__main__":
    sys.exit(main())
