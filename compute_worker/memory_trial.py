"""Whether the kernels read memory of their own faster than the pool, found out at start.

The pool is a memfd, of 4 KiB pages where the system makes no huge ones of it (`shm.huge_pages`);
anonymous memory may have huge ones. The same threads that compute read both, in turns, so that what
else the machine does meets both alike.
"""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compute_worker.matrix import Bytes

TRIAL_BYTES = 64 << 20  # twice the last-level cache of a small server; takes a tenth of a second
N_PASSES = 7
WORTH_IT = 1.05  # times the pool's speed: less is not worth the move


@dataclass(frozen=True, slots=True)
class MemoryTrial:
    """Bytes per second: read from the pool and from own memory, in the least disturbed pass, and
    moved from one to the other."""

    pool_rate: float
    own_rate: float
    move_rate: float

    def pays(self, expert_bytes: int, token_bytes: int, n_tokens: int | None) -> bool:
        """Whether experts are to be moved, where a token reads `token_bytes` of them: if it is
        faster then, and the move does not take longer than all tokens of the run gain by it. None
        for a run that goes on."""
        if self.own_rate <= self.pool_rate * WORTH_IT:
            return False
        gain_seconds = token_bytes / self.pool_rate - token_bytes / self.own_rate
        return n_tokens is None or n_tokens * gain_seconds > expert_bytes / self.move_rate

    def __str__(self) -> str:
        return (
            f"read at {self.own_rate / 1e9:.1f} GB/s there, {self.pool_rate / 1e9:.1f} in the "
            f"pool, moved at {self.move_rate / 1e9:.1f}"
        )


def try_memory(pool: memoryview, read_all: Callable[[Bytes], int]) -> MemoryTrial:
    """Read the beginning of the pool and as many bytes of anonymous memory, which are given back.

    `read_all` is that of the kernels. Raises `OSError` where there is no memory.
    """
    n_bytes = min(TRIAL_BYTES, len(pool)) // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        ours, own = np.frombuffer(pool[:n_bytes], np.uint8), np.frombuffer(mapping, np.uint8)
        read_all(ours)  # sets up the page table
        start = time.perf_counter()
        own[:] = ours
        move_rate = n_bytes / (time.perf_counter() - start)
        seconds = [(_timed(read_all, ours), _timed(read_all, own)) for _ in range(N_PASSES)]
        del own
    fastest_pool, fastest_own = (min(times) for times in zip(*seconds, strict=True))
    return MemoryTrial(n_bytes / fastest_pool, n_bytes / fastest_own, move_rate)


def _timed(read_all: Callable[[Bytes], int], data: Bytes) -> float:
    start = time.perf_counter()
    read_all(data)
    return time.perf_counter() - start
