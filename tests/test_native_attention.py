"""The C kernels' attention and KV cache writes, against the references and against themselves."""

from collections.abc import Iterator

import numpy as np
import pytest

from compute_worker import reference
from compute_worker.kv import KvCache
from compute_worker.matrix import Floats, Integers
from compute_worker.native_kernels import Engine, runnable_instruction_sets, unavailable_reason

SETS = runnable_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"native kernels: {unavailable_reason()}")

KINDS = ("f32", "f16", "q8_0")
# n_heads, n_kv_heads, head_width: one query per key, groups, more queries per key than one block
# of queries holds, widths that are whole vectors of no set or all
SHAPES = [(4, 4, 128), (8, 2, 64), (80, 1, 32), (3, 3, 16), (6, 2, 48), (4, 2, 96), (2, 1, 24)]
LENGTHS = (130, 64, 7)  # tokens of three sequences
N_LAYERS = 2
LAYER = 1


@pytest.fixture(params=SETS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = Engine(str(request.param), "fast", 2)
    yield opened
    opened.close()


def shapes_of(kind: str) -> list[tuple[int, int, int]]:
    return [shape for shape in SHAPES if kind != "q8_0" or shape[2] % 32 == 0]


CASES = [(kind, *shape) for kind in KINDS for shape in shapes_of(kind)]


def filled_cache(
    kind: str, n_kv_heads: int, head_width: int, rng: np.random.Generator
) -> tuple[KvCache, Integers]:
    """A cache with keys and values of all sequences in scattered blocks, and its tables."""
    blocks = [-(-length // 64) for length in LENGTHS]
    kv = KvCache(N_LAYERS, n_kv_heads, head_width, sum(blocks), kind)
    order = rng.permutation([kv.allocate() for _ in range(sum(blocks))]).astype(np.int32)
    tables = np.zeros((len(LENGTHS), max(blocks)), np.int32)
    for row, (n, stop) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[row, :n] = order[stop - n : stop]
    for row, length in enumerate(LENGTHS):
        k, v = rng.standard_normal((2, length, n_kv_heads, head_width), np.float32)
        owners = np.full(length, row, np.int32)
        reference.store_kv(kv, LAYER, k, v, tables, owners, np.arange(length, dtype=np.int32))
    return kv, tables


def all_places() -> tuple[Integers, Integers]:
    """Every position of every sequence, mixed."""
    owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    return owners.astype(np.int32), positions.astype(np.int32)


@pytest.mark.parametrize(("kind", "n_heads", "n_kv_heads", "head_width"), CASES)
def test_attention(
    engine: Engine, kind: str, n_heads: int, n_kv_heads: int, head_width: int
) -> None:
    rng = np.random.default_rng(3)
    kv, tables = filled_cache(kind, n_kv_heads, head_width, rng)
    owners, positions = all_places()
    q: Floats = rng.standard_normal((len(owners), n_heads, head_width), np.float32) * 2
    expected = reference.attention(q, kv, LAYER, tables, owners, positions)
    found = engine.attention(q, kv, LAYER, tables, owners, positions)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()

    for chosen in (rng.permutation(len(owners)), rng.permutation(len(owners))[:9], [70], [129]):
        part = engine.attention(q[chosen], kv, LAYER, tables, owners[chosen], positions[chosen])
        assert (part == found[chosen]).all()
    kv.close()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_future_may_hold_nan(engine: Engine, kind: str) -> None:
    rng = np.random.default_rng(4)
    kv, tables = filled_cache(kind, 2, 32, rng)
    owners, positions = all_places()
    q = rng.standard_normal((len(owners), 4, 32), np.float32)
    expected = engine.attention(q, kv, LAYER, tables, owners, positions)
    kv.data[tables[0, 1], :, :, :, 10:] = np.nan  # positions 74 .. 127 of sequence 0
    found = engine.attention(q, kv, LAYER, tables, owners, positions)
    earlier = (owners > 0) | (positions < 74)
    assert (found[earlier] == expected[earlier]).all()
    assert np.isnan(found[~earlier]).all()
    kv.close()


@pytest.mark.parametrize(("kind", "n_heads", "n_kv_heads", "head_width"), CASES)
def test_store_kv_writes_what_the_reference_writes(
    engine: Engine, kind: str, n_heads: int, n_kv_heads: int, head_width: int
) -> None:
    rng = np.random.default_rng(5)
    kv, tables = filled_cache(kind, n_kv_heads, head_width, rng)
    owners, positions = (a[::3] for a in all_places())
    k, v = rng.standard_normal((2, len(owners), n_kv_heads, head_width), np.float32) * 30
    k[0], v[1] = 0, k[1] * np.float32(1e-6)  # zeros, and half-precision denormals
    reference.store_kv(kv, LAYER, k, v, tables, owners, positions)
    expected = kv.data.copy()
    kv.data[:, LAYER] = 0
    kv.data[:, 0] = 1
    engine.store_kv(kv, LAYER, k, v, tables, owners, positions)
    blocks, rows = tables[owners, positions // 64], positions % 64
    found = kv.data[blocks, LAYER, :, :, rows]
    assert (found == expected[blocks, LAYER, :, :, rows]).all()
    assert (kv.data[:, 0] == 1).all()
    kv.data[blocks, LAYER, :, :, rows] = 0
    assert (kv.data[:, LAYER] == 0).all()
    kv.close()


def test_halves_round_to_nearest_even_and_overflow_to_infinity(engine: Engine) -> None:
    ordinary = [0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -1e9, 0.1]
    special = [np.inf, np.nan, 2**-24, 2**-25, 3 * 2**-25, 6.1e-5, 6.09e-5, -(2**-14)]
    values = np.array(ordinary + special, np.float32)
    kv = KvCache(1, 1, 16, 1, "f16")
    kv.allocate()
    place = np.zeros(1, np.int32)
    rows = values.reshape(1, 1, 16)
    engine.store_kv(kv, 0, rows, rows, np.zeros((1, 1), np.int32), place, place)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert np.array_equal(kv.data[0, 0, 0, 0, 0], expected, equal_nan=True)
    kv.close()
