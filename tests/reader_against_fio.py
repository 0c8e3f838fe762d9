"""The reader alone beside fio at the same size and depth: ``python tests/reader_against_fio.py F``.

Disks swing by a third within minutes, so both take turns (A B B A), and ratios are of neighbours.
fio (Debian package `fio`) reads whole aligned blocks as long as one range of a slab, with as many
reads in flight as the reader has threads. Prints a line per size and depth: medians of GB/s, and
of the ratio with the smallest and the largest.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from io_worker.read_speed import measure
from io_worker.reader import ModelFile, open_files
from shm.pool import align_up

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


def fio_speed(path: Path, block_bytes: int, depth: int, n_bytes: int) -> float:
    """Bytes per second of fio."""
    command = [
        "fio", "--name=reader", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1",
        "--ioengine=libaio", f"--iodepth={depth}", f"--bs={block_bytes}", f"--io_size={n_bytes}",
        "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["jobs"][0]["read"]
    return float(found["bw_bytes"])


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=4, help="each has two of both")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--slab-bytes", default=",".join(map(str, SLAB_BYTES)))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    options = parser.parse_args()
    (file,) = open_files([options.file])
    n_bytes = int(options.gigabytes * 1e9)
    print("slab MiB  depth  reader GB/s  fio GB/s  ratio [least, most]")
    for slab_bytes in map(int, options.slab_bytes.split(",")):
        block_bytes = align_up(slab_bytes // N_RANGES)
        for depth in map(int, options.depths.split(",")):
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(options.rounds):
                ours.append(reader_speed(file, slab_bytes, depth, n_bytes))
                theirs.append(fio_speed(options.file, block_bytes, depth, n_bytes))
                theirs.append(fio_speed(options.file, block_bytes, depth, n_bytes))
                ours.append(reader_speed(file, slab_bytes, depth, n_bytes))
            ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
            print(
                f"{slab_bytes / MiB:8.2f} {depth:6} {median(ours) / 1e9:12.2f} "
                f"{median(theirs) / 1e9:9.2f} {median(ratios):6.2f} "
                f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
