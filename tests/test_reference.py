"""The references against float64, and the rule that bits do not depend on the batch."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from random_weights import random_matrix

from compute_worker import reference
from compute_worker.arch import WEIGHT_TYPES
from compute_worker.kv import KvCache
from compute_worker.matrix import ExpertShape, Floats, Integers, Matrix, dequantise
from io_worker.ggml_types import row_bytes

SCATTERED = {"IQ1_M", "NVFP4"}  # the scale is no half float at one place


def matrix_of(type_name: str, n_rows: int, n_cols: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng(seed)
    kind = int(GGMLQuantizationType[type_name])
    if type_name in SCATTERED:  # small bytes are small scales, and none is NaN
        data = rng.integers(0, 56, n_rows * row_bytes(kind, n_cols), np.uint8)
    else:
        data = random_matrix(type_name, n_rows, n_cols, n_cols**-0.5, rng).ravel()
    return Matrix(data, kind, n_rows, n_cols)


def values_of(matrix: Matrix) -> npt.NDArray[np.float64]:
    return dequantise(matrix.data, matrix.type, matrix.n_cols).astype(np.float64)


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("type_name", sorted(WEIGHT_TYPES))
@pytest.mark.parametrize(("n_rows", "n_cols"), [(1, 256), (33, 512)])
def test_matmul_against_float64(type_name: str, n_rows: int, n_cols: int) -> None:
    matrix, x = matrix_of(type_name, n_rows, n_cols), normal(5, n_cols)
    expected = x.astype(np.float64) @ values_of(matrix).T
    found = reference.matmul(matrix, x)
    assert found.dtype == np.float32 and found.shape == (5, n_rows)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


def test_matmul_in_several_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = matrix_of("Q4_K", 100, 256), normal(3, 256)
    whole = reference.matmul(matrix, x)
    monkeypatch.setattr(reference, "PANEL_BYTES", 7 * 4 * 256)
    expected = x.astype(np.float64) @ values_of(matrix).T
    assert np.abs(reference.matmul(matrix, x) - expected).max() < 1e-5
    assert np.abs(whole - expected).max() < 1e-5


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q6_K"])
def test_matmul_of_a_token_does_not_depend_on_the_others(type_name: str) -> None:
    matrix, x = matrix_of(type_name, 96, 256), normal(65, 256)
    alone = np.concatenate([reference.matmul(matrix, x[i : i + 1]) for i in range(65)])
    for n_tokens in range(1, 66):
        assert (reference.matmul(matrix, x[:n_tokens]) == alone[:n_tokens]).all()
    order = np.random.default_rng(2).permutation(65)
    assert (reference.matmul(matrix, x[order]) == alone[order]).all()


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_matmul_does_not_depend_on_where_the_bytes_lie(type_name: str) -> None:
    """GGUF aligns to 32 bytes only, and a slot keeps the offset of the file."""
    matrix, x = matrix_of(type_name, 96, 256), normal(3, 256)
    expected = reference.matmul(matrix, x)
    room = np.empty(matrix.data.nbytes + 4096, np.uint8)
    for shift in (0, 4, 32, 36, 64, 100, 160, 2048):
        moved = room[shift : shift + matrix.data.nbytes]
        moved[:] = matrix.data
        there = Matrix(moved, matrix.type, matrix.n_rows, matrix.n_cols)
        shifted = np.empty(x.nbytes + shift, np.uint8)[shift:].view(np.float32).reshape(x.shape)
        shifted[:] = x
        assert (reference.matmul(there, shifted) == expected).all()


def silu64(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def test_silu() -> None:
    x = np.array([-1e30, -200, -88, -1, 0, 1, 88, 200, 1e30], np.float32)
    expected = [0, 0, 0, -0.26894142, 0, 0.73105858, 88, 200, 1e30]
    assert np.allclose(reference.silu(x), expected, atol=1e-30)


def expert_case(types: tuple[str, str, str], n_experts: int) -> tuple[ExpertShape, list[Matrix]]:
    width, inner = 256, 512
    shapes = ((inner, width), (inner, width), (width, inner))
    matrices = [
        matrix_of(kind, *shape, seed=10 * expert + part)
        for expert in range(n_experts)
        for part, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    ]
    ids = [int(GGMLQuantizationType[kind]) for kind in types]
    return ExpertShape(*ids, width, inner), matrices


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("Q4_K", "Q5_0", "Q6_K")])
def test_expert_blocks_against_float64(types: tuple[str, str, str]) -> None:
    shape, matrices = expert_case(types, 3)
    x = normal(4, 256)
    addresses = np.array([m.address for m in matrices], np.uint64).reshape(3, 3)
    pairs: list[Integers] = [np.array(p, np.int32) for p in ([0, 6], [1, 2, 5], [7])]
    out = np.full((8, 256), 99, np.float32)
    reference.expert_blocks(shape, addresses, pairs, 2, x, out)
    for expert, rows in enumerate(pairs):
        gate, up, down = (values_of(m) for m in matrices[3 * expert : 3 * expert + 3])
        for row in rows.tolist():
            token = x[row // 2].astype(np.float64)
            expected = down @ (silu64(gate @ token) * (up @ token))
            assert np.abs(out[row] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert (out[[3, 4]] == 99).all()  # in no pair: not written


def test_expert_blocks_in_waves_give_the_same_bits() -> None:
    shape, matrices = expert_case(("Q4_K", "Q4_K", "Q6_K"), 2)
    x = normal(33, 256)
    addresses = np.array([m.address for m in matrices], np.uint64).reshape(2, 3)
    everything = np.arange(33, dtype=np.int32)
    once, waves = np.zeros((2, 33, 256), np.float32)
    reference.expert_blocks(shape, addresses[:1], [everything], 1, x, once)
    for part in (everything[20:], everything[:1], everything[1:20]):
        pairs = [part[:0], part]
        reference.expert_blocks(shape, addresses[::-1], pairs, 1, x, waves)
    assert (once == waves).all()


def attention64(q: Floats, k: Floats, v: Floats) -> npt.NDArray[np.float64]:
    """One sequence, causal: q (T, H, hd), k and v (T, K, hd)."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = (part[: token + 1, head // group].astype(np.float64) for part in (k, v))
            scores = keys @ q[token, head].astype(np.float64) / np.sqrt(q.shape[2])
            shares = np.exp(scores - scores.max())
            out[token, head] = shares / shares.sum() @ values
    return out


def filled(
    kind: str, k: Floats, v: Floats, order: list[int] | None = None
) -> tuple[KvCache, Integers]:
    """A cache of two layers with the keys and values of one sequence in layer 1."""
    n_tokens, n_heads, head_width = k.shape
    kv = KvCache(2, n_heads, head_width, 8, kind)
    for _ in range(8):
        kv.allocate()
    n_blocks = -(-n_tokens // 64)
    table = np.array([order or list(range(n_blocks))], np.int32)
    positions = np.arange(n_tokens, dtype=np.int32)
    reference.store_kv(kv, 1, k, v, table, np.zeros(n_tokens, np.int32), positions)
    return kv, table


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 2e-6), ("f16", 1e-3), ("q8_0", 2e-2)])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_against_float64(
    kind: str, tolerance: float, n_heads: int, n_kv_heads: int
) -> None:
    n_tokens = 150  # three tiles, the last not full
    q = normal(n_tokens, n_heads, 32, seed=1)
    k, v = normal(n_tokens, n_kv_heads, 32, seed=2), normal(n_tokens, n_kv_heads, 32, seed=3)
    kv, table = filled(kind, k, v)
    places = (table, np.zeros(n_tokens, np.int32), np.arange(n_tokens, dtype=np.int32))
    found = reference.attention(q, kv, 1, *places)
    expected = attention64(q, k, v)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    assert not kv.data[:, 0].any()  # the other layer is not touched


def test_attention_of_a_token_does_not_depend_on_batch_blocks_or_future() -> None:
    n_tokens = 130
    q, k, v = (normal(n_tokens, 4, 32, seed=seed) for seed in (1, 2, 3))
    kv, table = filled("f32", k, v)
    sequence, positions = np.zeros(n_tokens, np.int32), np.arange(n_tokens, dtype=np.int32)
    whole = reference.attention(q, kv, 1, table, sequence, positions)
    for start, stop in [(0, 1), (5, 70), (63, 64), (64, 65), (129, 130)]:
        part = slice(start, stop)
        found = reference.attention(q[part], kv, 1, table, sequence[part], positions[part])
        assert (found == whole[part]).all()
    # other blocks, beside another sequence, and before anything later was stored
    kv, table = filled("f32", k[:70], v[:70], order=[5, 2])
    tables = np.array([[7, 7], table[0]], np.int32)
    found = reference.attention(q[60:70], kv, 1, tables, np.ones(10, np.int32), positions[60:70])
    assert (found == whole[60:70]).all()


def test_a_nan_in_the_future_of_a_block_is_not_seen() -> None:
    q, k, v = (normal(10, 2, 32, seed=seed) for seed in (1, 2, 3))
    clean, table = filled("f32", k, v)
    dirty, _ = filled("f32", k, v)
    dirty.data[0, 1, :, :, 7:] = np.nan
    places = (table, np.zeros(7, np.int32), np.arange(7, dtype=np.int32))
    expected = reference.attention(q[:7], clean, 1, *places)
    assert (reference.attention(q[:7], dirty, 1, *places) == expected).all()


def test_hostile_values_raise_no_warning() -> None:
    k = np.full((2, 1, 32), np.inf, np.float32)
    for kind in ("f32", "f16", "q8_0"):
        kv, table = filled(kind, k, np.full_like(k, 1e30))
        places = (table, np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
        assert reference.attention(k, kv, 1, *places).shape == (2, 1, 32)
