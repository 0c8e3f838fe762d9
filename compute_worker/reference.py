"""The definition of every heavy operation, in numpy: exact numerics, float32 activations.

Speed is not the aim, sameness is. BLAS is called with shapes that depend on the weights and the
tile only, one token at a time: a matrix × vector product per token and block of rows, and a product
of fixed shape per tile of attention. So an output element never depends on what else is in the
batch. (BLAS runs with one thread; the environment of the process sets that.)

Sums over a last axis are numpy's own, row by row: their order depends on the length of the row.
"""

from collections.abc import Sequence
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

from compute_worker.arch import KV_BLOCK_TOKENS
from compute_worker.kv import KvCache
from compute_worker.matrix import (
    Addresses,
    Bytes,
    ExpertShape,
    Floats,
    Integers,
    Matrix,
    dequantise,
    matrix_at,
)
from io_worker.ggml_types import row_bytes

# Of dequantised rows at a time: bounds scratch whatever the matrix. The intermediate arrays of
# dequantising are three times as large.
PANEL_BYTES = 4 * 1024 * 1024
Q8_0 = 8  # ggml type id


@np.errstate(all="ignore")
def matmul(matrix: Matrix, x: Floats) -> Floats:
    """``x @ matrix.T``: x (T, n_cols) -> (T, n_rows)."""
    n_tokens = len(x)
    out = np.empty((n_tokens, matrix.n_rows), np.float32)
    panel_rows = max(1, PANEL_BYTES // (4 * matrix.n_cols))
    stride = row_bytes(matrix.type, matrix.n_cols)
    for start in range(0, matrix.n_rows, panel_rows):
        stop = min(start + panel_rows, matrix.n_rows)
        rows = matrix.data[start * stride : stop * stride]
        panel = dequantise(rows, matrix.type, matrix.n_cols)  # (rows, n_cols)
        for token in range(n_tokens):
            out[token, start:stop] = panel @ x[token]
    return out


def matmuls(matrices: Sequence[Matrix], x: Floats) -> list[Floats]:
    """`matmul` of each with the same x (T, n_cols)."""
    return [matmul(matrix, x) for matrix in matrices]


@np.errstate(all="ignore")
def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Scale each row of x (N, n) to a root mean square of 1, then by `weight` (n)."""
    # `np.mean` does the same sum and division at twice the time: this runs four times a layer
    mean_square = np.add.reduce(np.square(x), axis=-1, keepdims=True) / np.float32(x.shape[-1])
    scaled: Floats = x * np.reciprocal(np.sqrt(mean_square + np.float32(epsilon)))
    scaled *= weight
    return scaled


@np.errstate(all="ignore")
def rotate(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Turn x (T, heads, hd) by the angles of its tokens, (T, rope_width / 2); returns x, changed.

    Element i pairs with i + rope_width / 2 (the NeoX order); elements from rope_width on stay.
    """
    half = cosines.shape[-1]
    cosines, sines = cosines[:, None], sines[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = second * cosines + first * sines
    x[..., :half] = first * cosines - second * sines
    x[..., half : 2 * half] = turned
    return x


@np.errstate(all="ignore")
def top_experts(scores: Floats, n_active: int, norm_topk: bool) -> tuple[Integers, Floats]:
    """The experts of each token from scores (T, E): ids (T, A) ascending, and weights (T, A).

    Softmax over all experts, then the A largest; the lower id wins a tie, NaN comes last. Scaled to
    sum 1 only where the architecture does so. Always A different ids. May change `scores`.
    """
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))  # (T, E)
    shares /= shares.sum(axis=-1, keepdims=True)
    best = np.argsort(-shares, axis=-1, kind="stable")[:, :n_active]
    chosen = np.sort(best, axis=-1)  # (T, A)
    weights = np.take_along_axis(shares, chosen, axis=-1)  # (T, A)
    if norm_topk:
        weights /= weights.sum(axis=-1, keepdims=True)
    return chosen.astype(np.int32), weights


def read_all(data: Bytes) -> int:
    """Sum of all 64-bit words of `data`, modulo 2**64: how fast memory can be read.

    What is left behind the last word does not count.
    """
    n_bytes = data.nbytes // 8 * 8
    return int(data[:n_bytes].view(np.uint64).sum())


@np.errstate(all="ignore")
def combine(out: Floats, weights: Floats) -> Floats:
    """Add up what the experts gave: out (T * A, D), weights (T, A) -> (T, D), a view of `out`.

    In ascending expert id, one expert after another, whatever the order they were computed in.
    Works in `out` itself: it is the largest array of a prompt chunk.
    """
    n_tokens, n_active = weights.shape
    parts = out.reshape(n_tokens, n_active, -1)  # (T, A, D)
    parts *= weights[:, :, None]
    total = parts[:, 0]  # (T, D)
    for place in range(1, n_active):
        total += parts[:, place]
    return total


@np.errstate(all="ignore")
def silu(x: Floats) -> Floats:
    """``x · sigmoid(x)``, element by element."""
    scaled: Floats = np.divide(x, np.float32(1) + np.exp(-x))
    return scaled


def expert_blocks(
    shape: ExpertShape,
    addresses: Addresses,
    pairs: Sequence[Integers],
    n_active: int,
    x: Floats,
    out: Floats,
) -> None:
    """Feed-forward blocks of some experts, each for the tokens that chose it.

    addresses (N, 3): byte addresses of gate, up, down of N experts, whose bytes the caller keeps in
    place; x (T, D); out (T * A, D) is written at the rows in `pairs` only. Row ``p`` belongs to
    token ``p // n_active``: for every p in pairs[i]
    ``out[p] = down @ (silu(gate @ x[p // A]) * (up @ x[p // A]))``.
    """
    for where, rows in zip(addresses.tolist(), pairs, strict=True):
        gate, up, down = (
            matrix_at(address, *matrix)
            for address, matrix in zip(where, shape.matrices(), strict=True)
        )
        chosen = x[rows // n_active]  # (n, D)
        inner = silu(matmul(gate, chosen)) * matmul(up, chosen)  # (n, F)
        out[rows] = matmul(down, inner)  # (n, D)


@np.errstate(all="ignore")
def attention(
    q: Floats,
    kv: KvCache,
    layer: int,
    tables: Integers,
    sequence_of_token: Integers,
    positions: Integers,
) -> Floats:
    """Causal attention of each token over its own sequence, positions 0 to its own.

    q (T, H, hd); tables (S, max_blocks) hold the blocks of each sequence. Heads share keys in
    groups of H / K neighbours. Tiles are the 64 positions of a block, always whole, in ascending
    order. -> (T, H, hd)
    """
    n_tokens, n_heads, head_width = q.shape
    n_kv_heads = kv.data.shape[3]
    scale = np.float32(1 / np.sqrt(head_width))
    out = np.empty_like(q)
    for token in range(n_tokens):
        position = int(positions[token])
        table = tables[sequence_of_token[token]]
        grouped = (q[token] * scale).reshape(n_kv_heads, -1, head_width)  # (K, H/K, hd)
        n_tiles = position // KV_BLOCK_TOKENS + 1
        out[token] = _attend(grouped, kv, layer, table[:n_tiles], position).reshape(n_heads, -1)
    return out


def _attend(q: Floats, kv: KvCache, layer: int, blocks: Integers, position: int) -> Floats:
    """One token: q (K, G, hd), its blocks in order -> (K, G, hd)."""
    shape = (len(blocks), *q.shape[:2], KV_BLOCK_TOKENS)
    scores: Floats = np.full(shape, -np.inf, np.float32)
    n_last = position % KV_BLOCK_TOKENS + 1  # rows of the last tile that are not in the future
    for tile, block in enumerate(blocks):
        keys = read_tile(kv, block, layer, 0)  # (K, 64, hd)
        n_valid = n_last if tile == len(blocks) - 1 else KV_BLOCK_TOKENS
        scores[tile, :, :, :n_valid] = (q @ keys.swapaxes(1, 2))[:, :, :n_valid]
    weights: Floats = np.exp(scores - scores.max(axis=(0, 3), keepdims=True))  # (tiles, K, G, 64)
    total = np.zeros((*q.shape[:2], 1), np.float32)
    mixed = np.zeros_like(q)
    for tile, block in enumerate(blocks):
        values = read_tile(kv, block, layer, 1)  # (K, 64, hd)
        if tile == len(blocks) - 1:
            values[:, n_last:] = 0  # the future may hold NaN, and 0 · NaN is NaN
        total += weights[tile].sum(axis=-1, keepdims=True)
        mixed += weights[tile] @ values
    mixed /= total
    return mixed


def read_tile(kv: KvCache, block: int, layer: int, part: int) -> Floats:
    """A copy of one tile of keys (part 0) or values (part 1): (K, 64, hd) float32."""
    stored = kv.data[block, layer, part]
    if kv.kind == "q8_0":
        rows = np.ascontiguousarray(stored, np.uint8)
        return dequantise(rows, Q8_0, kv.head_width).reshape(*stored.shape[:2], kv.head_width)
    tile: Floats = stored.astype(np.float32)
    return tile


@np.errstate(all="ignore")
def store_kv(
    kv: KvCache,
    layer: int,
    k: Floats,
    v: Floats,
    tables: Integers,
    sequence_of_token: Integers,
    positions: Integers,
) -> None:
    """Write keys and values (T, K, hd) of the tokens to their places. Mutates `kv`."""
    blocks = tables[sequence_of_token, positions // KV_BLOCK_TOKENS]  # (T)
    rows = positions % KV_BLOCK_TOKENS
    for part, values in enumerate((k, v)):
        kv.data[blocks, layer, part, :, rows] = _encode(values, kv.kind)


def _encode(values: Floats, kind: str) -> npt.NDArray[Any]:
    """(T, K, hd) float32 as the cache stores it."""
    if kind == "q8_0":
        n_tokens, n_heads, head_width = values.shape
        rows = np.ascontiguousarray(values).reshape(-1, head_width)
        blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        return blocks.reshape(n_tokens, n_heads, -1)
    return values.astype(np.float16) if kind == "f16" else values
