"""How fast the kernels read weights: ``python -P -m compute_worker.kernel_speed``.

Multiplies one large matrix of each type with one token (or ``--tokens``), in the memory that
experts lie in (a memfd with 4 KiB pages) and in anonymous memory with huge pages, with each number
of threads. Beside it the memory bus itself: a sum over the same bytes by the same threads. Passes
are interleaved (bus, every type, bus, …), so that what else the machine does meets all alike.

One line per memory, thread count and type: GB of weights per second (median, and the least
disturbed pass), the median's share of the bus's, weights and multiplications per second. With
several tokens the last is what counts.
"""

import argparse
import functools
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from compute_worker.matrix import Matrix
from compute_worker.native_kernels import Engine, runnable_instruction_sets, unavailable_reason
from io_worker.ggml_types import GGML_TYPES, row_bytes

Bytes = npt.NDArray[np.uint8]
BUFFER_BYTES = 256 << 20  # eight times the last-level cache of a small server
N_COLUMNS = 2048  # the width of both first models
N_PASSES = 9
TYPE_IDS = {kind.name: kind.id for kind in GGML_TYPES.values()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 4 where there are no native kernels."""
    parser = argparse.ArgumentParser(prog="compute_worker.kernel_speed", description=__doc__)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="default: all that have kernels")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--numerics", choices=["exact", "fast"], default="fast")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=BUFFER_BYTES)
    parser.add_argument("--instruction-set", help="default: the best of this machine")
    options = parser.parse_args(arguments)
    reason = unavailable_reason()
    if reason is not None:
        print(f"kernel_speed: no native kernels: {reason}", file=sys.stderr)
        return 4
    instruction_set = options.instruction_set or runnable_instruction_sets()[0]
    print(f"{instruction_set} {options.numerics}, {options.tokens} token(s), {N_COLUMNS} columns")
    for name, memory in (("memfd 4 KiB", small_pages), ("huge pages", huge_pages)):
        with memory(options.bytes) as data:
            # Below 64 every byte is part of a finite number, whatever the type makes of it.
            data[:] = np.random.default_rng(0).integers(0, 64, len(data), np.uint8)
            for n_threads in options.threads:
                engine = Engine(instruction_set, options.numerics, n_threads)
                for line in measure(engine, data, options.types, options.tokens):
                    print(f"{name:11} {n_threads} thread(s)  {line}", flush=True)
                engine.close()
            del data
    return 0


@contextmanager
def small_pages(n_bytes: int) -> Iterator[Bytes]:
    """A memfd, as the pool is."""
    fd = os.memfd_create("kernel_speed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, n_bytes)
        with mmap.mmap(fd, n_bytes) as mapping:
            yield np.frombuffer(mapping, np.uint8)
    finally:
        os.close(fd)


@contextmanager
def huge_pages(n_bytes: int) -> Iterator[Bytes]:
    """Anonymous memory, as dense weights are."""
    with mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        yield np.frombuffer(mapping, np.uint8)


def measure(
    engine: Engine, data: Bytes, types: Sequence[str] | None, n_tokens: int
) -> Iterator[str]:
    """Lines of one engine over one memory: the bus first, then each type."""
    x = np.random.default_rng(1).standard_normal((n_tokens, N_COLUMNS), np.float32)
    names = types or [name for name, number in TYPE_IDS.items() if engine.has_type(number)]
    matrices = {name: matrix_in(data, TYPE_IDS[name]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in ("bus", *matrices)}
    for _ in range(N_PASSES):
        seconds["bus"].append(timed(lambda: engine.read_all(data)))
        for name, matrix in matrices.items():
            seconds[name].append(timed(functools.partial(engine.matmul, matrix, x)))
    bus = len(data) / statistics.median(seconds["bus"]) / 1e9
    best_bus = len(data) / min(seconds["bus"]) / 1e9
    yield f"{'bus':8} {bus:6.2f} GB/s (best {best_bus:5.2f})"
    for name, matrix in matrices.items():
        median = statistics.median(seconds[name])
        rate = len(matrix.data) / median / 1e9
        best = len(matrix.data) / min(seconds[name]) / 1e9
        weights = matrix.n_rows * matrix.n_cols / median / 1e9
        yield (
            f"{name:8} {rate:6.2f} GB/s (best {best:5.2f})  {rate / bus:4.0%} of the bus"
            f"  {weights:6.1f} G weights/s"
            f"  {weights * n_tokens:6.1f} G multiplications/s"
        )


def matrix_in(data: Bytes, type_id: int) -> Matrix:
    """As many rows of a type as the buffer holds."""
    stride = row_bytes(type_id, N_COLUMNS)
    n_rows = len(data) // stride
    return Matrix(data[: n_rows * stride], type_id, n_rows, N_COLUMNS)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
