"""KV blocks to a file and back, as they lie in memory. Where in the file is the caller's choice."""

import os

from compute_worker.kv import KvCache


class KvFileError(Exception):
    """The file is shorter than it should be; one line."""


def write_blocks(fd: int, offset: int, kv: KvCache, blocks: list[int]) -> None:
    """Write blocks one behind the other; raises `OSError`."""
    for block in blocks:
        data = memoryview(kv.data[block]).cast("B")
        while data:
            n_bytes = os.pwrite(fd, data, offset)
            data, offset = data[n_bytes:], offset + n_bytes


def read_blocks(fd: int, offset: int, kv: KvCache, n_blocks: int) -> list[int]:
    """Allocate blocks and fill them; raises `OSError`, `KvCacheFull`, `KvFileError`."""
    blocks = []
    for _ in range(n_blocks):
        block = kv.allocate()
        blocks.append(block)
        data = memoryview(kv.data[block]).cast("B")
        while data:
            n_bytes = os.preadv(fd, [data], offset)
            if n_bytes == 0:
                raise KvFileError(f"session: expected a block at byte {offset}, found the end")
            data, offset = data[n_bytes:], offset + n_bytes
    return blocks
