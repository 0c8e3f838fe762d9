"""Blocks of the KV cache: references, zeroed contents, memory that comes and goes."""

import random
from pathlib import Path

import numpy as np
import pytest

from compute_worker.kv import KvCache, KvCacheFull, n_blocks_needed


@pytest.mark.parametrize(
    ("n_tokens", "n_blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (4096, 64)]
)
def test_blocks_needed(n_tokens: int, n_blocks: int) -> None:
    assert n_blocks_needed(n_tokens) == n_blocks


@pytest.mark.parametrize(
    ("kind", "dtype", "row"),
    [("f32", np.float32, 32), ("f16", np.float16, 32), ("q8_0", np.uint8, 34)],
)
def test_layout(kind: str, dtype: type, row: int) -> None:
    kv = KvCache(n_layers=3, n_kv_heads=2, head_width=32, n_blocks=4, kind=kind)
    assert kv.data.shape == (4, 3, 2, 2, 64, row) and kv.data.dtype == dtype
    assert kv.data.flags.c_contiguous
    assert kv.block_bytes == kv.data[0].nbytes


def test_q8_0_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="q8_0"):
        KvCache(1, 1, 48, 1, "q8_0")


def test_a_block_lives_as_long_as_its_last_reference() -> None:
    kv = KvCache(1, 1, 8, 2, "f32")
    block = kv.allocate()
    kv.data[block] = np.nan
    kv.share(block)
    kv.free(block)
    assert np.isnan(kv.data[block]).all() and kv.n_free == 1
    kv.free(block)
    assert kv.n_free == 2
    again = kv.allocate()
    assert again == block and (kv.data[again] == 0).all()


def test_full() -> None:
    kv = KvCache(1, 1, 8, 2, "f32")
    kv.allocate()
    kv.allocate()
    with pytest.raises(KvCacheFull, match="all 2 blocks are in use"):
        kv.allocate()


def test_a_free_block_can_be_neither_shared_nor_freed() -> None:
    kv = KvCache(1, 1, 8, 2, "f32")
    with pytest.raises(AssertionError):
        kv.share(0)
    with pytest.raises(AssertionError):
        kv.free(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_against_a_plain_model(seed: int) -> None:
    """Blocks are 4,352 bytes, so neighbours share pages: freeing one must not touch the next."""
    chance = random.Random(seed)
    kv = KvCache(1, 1, 32, 12, "q8_0")
    held: dict[int, tuple[int, int]] = {}  # block -> references, mark
    for step in range(2000):
        action = chance.choice(["allocate", "share", "free", "free"])
        if action == "allocate" and kv.n_free:
            block = kv.allocate()
            assert block not in held and not kv.data[block].any()
            mark = step % 255 + 1
            kv.data[block] = mark
            held[block] = (1, mark)
        elif held and action != "allocate":
            block = chance.choice(sorted(held))
            references, mark = held.pop(block)
            references += 1 if action == "share" else -1
            (kv.share if action == "share" else kv.free)(block)
            if references:
                held[block] = (references, mark)
        kv.check()
        assert kv.n_free == 12 - len(held)
        assert kv.used_bytes == len(held) * kv.block_bytes
        assert all((kv.data[block] == mark).all() for block, (_, mark) in held.items())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_charged_per_block() -> None:
    kv = KvCache(n_layers=16, n_kv_heads=16, head_width=128, n_blocks=64, kind="f32")
    before = resident_bytes()
    blocks = [kv.allocate() for _ in range(4)]
    charged = resident_bytes() - before
    assert 4 * kv.block_bytes <= charged + (1 << 20) and charged < 5 * kv.block_bytes + (4 << 20)
    for block in blocks:
        kv.free(block)
    assert resident_bytes() - before < kv.block_bytes
    kv.close()


def test_close_unmaps() -> None:
    kv = KvCache(1, 1, 8, 1, "f32")
    kv.close()
    assert not hasattr(kv, "data")
