"""The KV cache: blocks of 64 tokens in one reserved range of addresses, with reference counts.

    data (n_blocks, L, 2, K, 64, head_width)      2: keys, values;  K: key-value heads

The token at absolute position ``p`` of a sequence with block table ``table`` lies in block
``table[p // 64]``, row ``p % 64``. Keys are stored after rotation. As q8_0 the last dimension is
bytes: per 32 elements an f16 scale and 32 int8, a ggml Q8_0 row.

Address space for all blocks is reserved at start; memory is charged when a block is allocated and
returned when its last reference goes. A block is zeroed at allocation: attention reads whole tiles
and a NaN left by an earlier owner must not reach a masked product. Blocks of whole huge pages lie
in such: touching 64 MiB for the first time takes 9 ms instead of 40, which a prompt would wait for.

This module knows nothing about sequences; who holds which block is the caller's table.
"""

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from compute_worker.arch import KV_BLOCK_TOKENS, KV_BYTES_PER_32

DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "q8_0": np.uint8}
HUGE_PAGE_BYTES = 2 * 1024 * 1024  # of x86-64, and of ARM with pages of 4 KiB


class KvCacheFull(Exception):
    """No block is free. The quota is fixed at start; the caller ends or delays a sequence."""


def n_blocks_needed(n_tokens: int) -> int:
    """Blocks that hold a sequence of this many tokens."""
    return -(-n_tokens // KV_BLOCK_TOKENS)


class KvCache:
    """Keys and values of all sequences. `data` is valid until `close`."""

    def __init__(
        self, n_layers: int, n_kv_heads: int, head_width: int, n_blocks: int, kind: str
    ) -> None:
        """`kind` is "f32", "f16" or "q8_0" (then `head_width` is a multiple of 32).

        Raises `OSError` (ENOMEM) where the address space cannot be reserved.
        """
        if kind == "q8_0" and head_width % 32:
            raise ValueError(
                f"kv type q8_0: expected heads of a multiple of 32, found {head_width}"
            )
        self.kind = kind
        self.n_blocks = n_blocks
        self.head_width = head_width
        row = head_width // 32 * KV_BYTES_PER_32[kind] if kind == "q8_0" else head_width
        shape = (n_blocks, n_layers, 2, n_kv_heads, KV_BLOCK_TOKENS, row)
        dtype = np.dtype(DTYPES[kind])
        self.block_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        n_bytes = max(1, n_blocks) * self.block_bytes
        if self.block_bytes % HUGE_PAGE_BYTES:
            self._map, self._first = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE), 0
        else:
            self._map, self._first = _huge_pages(n_bytes)
        self.data: npt.NDArray[Any] = np.frombuffer(
            self._map, dtype, count=int(np.prod(shape)), offset=self._first
        ).reshape(shape)
        self._free = list(range(n_blocks - 1, -1, -1))  # a stack: low blocks first
        self._references = [0] * n_blocks

    @property
    def n_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Memory charged now."""
        return (self.n_blocks - self.n_free) * self.block_bytes

    def allocate(self) -> int:
        """Take one block, zeroed, with one reference; raises `KvCacheFull`."""
        if not self._free:
            raise KvCacheFull(f"kv cache: all {self.n_blocks} blocks are in use")
        block = self._free.pop()
        self._references[block] = 1
        self.data[block] = 0
        return block

    def share(self, block: int) -> None:
        """One more sequence uses this block. Shared blocks are full and never written again."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] += 1

    def free(self, block: int) -> None:
        """One reference less; the last one gives the memory back to the system."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
            self._return_memory(block)

    def check(self) -> None:
        """State the invariants; tests run this after every step."""
        assert sorted(self._free) == [b for b, n in enumerate(self._references) if n == 0]
        assert all(n >= 0 for n in self._references)

    def close(self) -> None:
        """Unmap. No view of `data` may live any more."""
        del self.data
        self._map.close()

    def _return_memory(self, block: int) -> None:
        """Only pages that lie wholly inside: a neighbour may be in use."""
        begin = self._first + block * self.block_bytes
        start = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (begin + self.block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _huge_pages(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Reserved addresses, and the offset from which they are whole huge pages."""
    mapping = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    address = int(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -address % HUGE_PAGE_BYTES
