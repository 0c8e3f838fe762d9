"""What the disk gives: ``python -P -m io_worker.disk_speed FILE``.

Plain O_DIRECT reads of one size at random places into memory like the pool's, `depth` threads with
buffers of their own, for a fixed time per depth, with the rate of every second: a disk that
throttles is fast at first. No queue, no slots, no checks: what the engine reads below this is its
own cost (`read_speed` measures that).
With `--ways` every other way of reading too, random and sequential, a shorter time each.
Prints one JSON object.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence

from io_worker.disk_ways import Reads, cached_share, direct_reads, read_file, ways_of
from io_worker.reader import ModelFile, ModelFileError, close_files, open_files
from shm.pool import ALIGNMENT, align_up

DEPTHS = (1, 2, 4, 8)
THROTTLED_SHARE = 0.8  # of the first seconds' rate
EXIT_MODEL = 3
WAY_SHARE = 0.25  # of the time of one depth


def main() -> int:
    """Exit code: 0, or 3 for a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="io_worker.disk_speed", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--read-bytes", type=int, default=3 << 20)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each depth")
    parser.add_argument("--ways", action="store_true", help="every way of reading")
    options = parser.parse_args()
    try:
        (file,) = files = open_files([options.file])
    except ModelFileError as error:
        print(error, file=sys.stderr)
        return EXIT_MODEL
    read_bytes = min(align_up(options.read_bytes), file.size_bytes // ALIGNMENT * ALIGNMENT)
    rows = []
    if file.direct_fd is not None and read_bytes > 0:
        for depth in map(int, options.depths.split(",")):
            rows.append(summary(depth, read_for(file, read_bytes, depth, options.seconds)))
    ways = measured_ways(file, read_bytes, options.seconds * WAY_SHARE) if options.ways else []
    refusal = file.direct_refusal if file.direct_fd is None else ""
    found = {"read_bytes": read_bytes, "direct_refusal": refusal, "depths": rows, "ways": ways}
    print(json.dumps(found))
    close_files(files)
    return 0


def measured_ways(file: ModelFile, read_bytes: int, seconds: float) -> list[dict[str, object]]:
    """A row for each way, order and depth; `cached`: the share that could not be dropped."""
    rows: list[dict[str, object]] = []
    if read_bytes == 0:
        return rows
    for way, order, depth in ways_of(file):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cached = cached_share(file)
        reads = read_file(file, way, order, read_bytes, depth, seconds)
        row = summary(depth, reads)
        rows.append({"way": way, "order": order, "cached": cached, **row})
    return rows


def read_for(file: ModelFile, read_bytes: int, depth: int, seconds: float) -> Reads:
    """Read with `depth` threads for so long; raises `OSError` of a failed read."""
    reads: list[Reads] = [[] for _ in range(depth)]
    errors: list[OSError] = []
    start = time.monotonic()

    def work(number: int) -> None:
        draw = random.Random(number)
        n_places = (file.size_bytes - read_bytes) // ALIGNMENT + 1
        with direct_reads(file, read_bytes, depth) as read:
            while (now := time.monotonic() - start) < seconds and not errors:
                try:
                    offset = draw.randrange(n_places) * ALIGNMENT
                    n_read = read(offset, read_bytes)
                except OSError as error:
                    errors.append(error)
                    return
                now = time.monotonic() - start
                reads[number].append((now, n_read))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sorted(read for each in reads for read in each)


def summary(depth: int, reads: Reads) -> dict[str, object]:
    """GB/s over all, of each whole second, and whether the end is much slower than the start."""
    if not reads:
        return {"depth": depth, "gb_per_s": 0.0, "per_second": [], "throttles": False}
    wall = reads[-1][0]
    per_second = rates(reads)
    return {
        "depth": depth,
        "gb_per_s": round(sum(n for _, n in reads) / wall / 1e9, 3),
        "per_second": [round(rate / 1e9, 3) for rate in per_second],
        "throttles": throttles(per_second),
    }


def rates(reads: Reads) -> list[float]:
    """Bytes of each whole second, by when a read ended."""
    n_seconds = int(reads[-1][0])
    totals = [0.0] * n_seconds
    for moment, n_bytes in reads:
        if moment < n_seconds:
            totals[int(moment)] += n_bytes
    return totals


def throttles(per_second: Sequence[float]) -> bool:
    """Whether the last quarter is slower than the first by more than noise."""
    quarter = len(per_second) // 4
    if quarter == 0:
        return False
    first, last = per_second[:quarter], per_second[-quarter:]
    return sum(last) < THROTTLED_SHARE * sum(first)


if __name__ == "__main__":
    sys.exit(main())
