"""The forward pass over a ragged batch: tokens of several sequences in one matrix.

It can stop and go on at every layer boundary: all state is `hidden`, the layer to go on with, and
the KV cache. Experts arrive through a callable, so this module does not know where they lie.

No result depends on what else is in the batch: every operation works row by row, with an order of
additions that is fixed by the length of the row. Keep it so (see `kernels`).

Shapes: T tokens, D model width, H query heads, K key-value heads, hd head width, E experts,
A active experts, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from compute_worker.arch import ModelSpec
from compute_worker.kernels import Kernels
from compute_worker.kv import KvCache
from compute_worker.matrix import Floats, Integers
from compute_worker.weights import Router, Weights

# Attention takes a prompt chunk in parts of so many tokens: a quarter of its arrays at a chunk of
# 1,024, and no slower, since the weights are read once per part from a part that is large enough.
ATTENTION_TOKENS = 256
Rotation = tuple[Floats, Floats]  # cosines and sines, (T, rope_width / 2)
# experts(layer, x (T, D), chosen (T, A) ascending ids, weights (T, A)) -> (T, D)
Experts = Callable[[int, Floats, Integers, Floats], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of one step. The tokens of a sequence are in ascending position, all of its earlier
    positions are in the KV cache, and its table has a block for each position."""

    token_ids: Integers  # (T)
    positions: Integers  # (T), absolute in their sequence
    sequence_of_token: Integers  # (T), row of `tables`
    tables: Integers  # (S, most blocks), KV blocks of each sequence

    def parts(self, most_tokens: int) -> "Iterator[tuple[slice, Batch]]":
        """The same tokens in order, `most_tokens` at a time, with their rows."""
        for start in range(0, len(self.token_ids), most_tokens):
            rows = slice(start, start + most_tokens)
            owners = self.sequence_of_token[rows]
            yield rows, Batch(self.token_ids[rows], self.positions[rows], owners, self.tables)


def embed(weights: Weights, batch: Batch) -> Floats:
    """The hidden state before layer 0: (T, D)."""
    return weights.embedding.rows(batch.token_ids)


@np.errstate(all="ignore")  # the weights of a hostile file may be NaN
def forward(
    weights: Weights,
    batch: Batch,
    hidden: Floats,
    layers: Iterable[int],
    kv: KvCache,
    experts: Experts,
    kernels: Kernels,
) -> Floats:
    """Apply `layers` to `hidden` (T, D), in place; returns it. Writes their keys and values.

    Layers are taken one by one, so a generator may stop between two of them by raising.
    """
    epsilon = weights.spec.rms_epsilon
    parts = list(batch.parts(ATTENTION_TOKENS))
    rotations = [rotation_of(weights.spec, part.positions) for _, part in parts]
    for index in layers:
        layer = weights.layers[index]
        for (rows, part), rotation in zip(parts, rotations, strict=True):
            hidden[rows] += attend(weights, index, hidden[rows], part, rotation, kv, kernels)

        x = kernels.rms_norm(hidden, layer.ffn_norm, epsilon)  # (T, D)
        chosen, shares = route(x, layer.router, kernels)  # (T, A), (T, A)
        hidden += experts(index, x, chosen, shares)  # (T, D)
    return hidden


def attend(
    weights: Weights,
    index: int,
    hidden: Floats,
    batch: Batch,
    rotation: Rotation,
    kv: KvCache,
    kernels: Kernels,
) -> Floats:
    """What the attention of one layer adds to `hidden` (T, D) -> (T, D)."""
    spec, layer = weights.spec, weights.layers[index]
    places = (batch.tables, batch.sequence_of_token, batch.positions)
    norm_heads = QK_NORMS[spec.qk_norm]
    x = kernels.rms_norm(hidden, layer.attn_norm, spec.rms_epsilon)  # (T, D)
    q, k, v = kernels.matmuls((layer.q, layer.k, layer.v), x)
    q, k = norm_heads(q, layer.q_norm, spec, kernels), norm_heads(k, layer.k_norm, spec, kernels)
    q = kernels.rotate(as_heads(q, spec.n_heads), *rotation)  # (T, H, hd)
    k = kernels.rotate(as_heads(k, spec.n_kv_heads), *rotation)  # (T, K, hd)
    v = as_heads(v, spec.n_kv_heads)  # (T, K, hd)
    kernels.store_kv(kv, index, k, v, *places)
    mixed = kernels.attention(q, kv, index, *places)  # (T, H, hd)
    return kernels.matmul(layer.attn_output, mixed.reshape(len(x), -1))  # (T, D)


def logits(weights: Weights, hidden: Floats, kernels: Kernels) -> Floats:
    """Scores of every token of the vocabulary after the last layer: (N, D) -> (N, V)."""
    x = kernels.rms_norm(hidden, weights.output_norm, weights.spec.rms_epsilon)
    return kernels.matmul(weights.output, x)


def route(x: Floats, router: Router, kernels: Kernels) -> tuple[Integers, Floats]:
    """The experts of each token, x (T, D): ids (T, A) ascending, and their weights (T, A)."""
    scores = kernels.matmul(router.matrix, x)  # (T, E)
    return kernels.top_experts(scores, router.n_active, router.norm_topk)


def group_by_expert(chosen: Integers) -> dict[int, Integers]:
    """For each expert that `chosen` (T, A) names, ascending: its pairs ``token * A + place``,
    ascending. These are the rows of `out` that `expert_blocks` writes and `combine` adds."""
    flat = chosen.ravel()
    if len(chosen) == 1:  # one token: its experts are different and ascending, and time counts
        return dict(zip(flat.tolist(), np.arange(flat.size, dtype=np.int32)[:, None], strict=True))
    order = np.argsort(flat, kind="stable").astype(np.int32)
    experts, starts = np.unique(flat[order], return_index=True)
    return dict(zip(experts.tolist(), np.split(order, starts[1:]), strict=True))


def as_heads(x: Floats, n_heads: int) -> Floats:
    """(T, n_heads * hd) -> (T, n_heads, hd), a view."""
    return x.reshape(len(x), n_heads, -1)


def _norm_whole(x: Floats, weight: Floats | None, spec: ModelSpec, kernels: Kernels) -> Floats:
    """One root mean square over the vector of all heads."""
    assert weight is not None
    return kernels.rms_norm(x, weight, spec.rms_epsilon)


def _norm_each(x: Floats, weight: Floats | None, spec: ModelSpec, kernels: Kernels) -> Floats:
    """One root mean square per head; the heads share `weight`."""
    assert weight is not None
    heads = x.reshape(-1, spec.head_width)
    return kernels.rms_norm(heads, weight, spec.rms_epsilon).reshape(x.shape)


def _norm_none(x: Floats, weight: Floats | None, spec: ModelSpec, kernels: Kernels) -> Floats:
    return x


# x (T, heads * hd) -> the same shape
QK_NORMS: Mapping[str, Callable[[Floats, Floats | None, ModelSpec, Kernels], Floats]] = {
    "whole": _norm_whole,
    "head": _norm_each,
    "none": _norm_none,
}


def rotation_of(spec: ModelSpec, positions: Integers) -> Rotation:
    """Angles of rotary embedding: pair i turns by ``position * base ** (-2 i / rope_width)``."""
    exponents = np.arange(0, spec.rope_width, 2) / spec.rope_width
    angles = positions[:, None] * spec.rope_base**-exponents  # (T, rope_width / 2), float64
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
