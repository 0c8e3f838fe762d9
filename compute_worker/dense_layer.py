"""The dense halves of a layer, attention and choice of experts, from the operations of `Kernels`.

This is their definition, and what runs where a provider has no call for a half as a whole. A call
for the whole (`native_layer`) does the same operations in the same order: no bit differs.

Shapes: T tokens, D model width, H query heads, K key-value heads, hd head width, E experts,
A active experts.
"""

from compute_worker.kernels import Kernels, Places
from compute_worker.kv import KvCache
from compute_worker.matrix import Floats, Integers
from compute_worker.weights import Router, Weights


def attend(
    kernels: Kernels, weights: Weights, index: int, hidden: Floats, places: Places, kv: KvCache
) -> None:
    """Add to `hidden` (T, D) what the attention of one layer gives. Writes keys and values."""
    spec, layer = weights.spec, weights.layers[index]
    where = (places.tables, places.sequence_of_token, places.positions)
    rotation = (places.cosines, places.sines)
    x = kernels.rms_norm(hidden, layer.attn_norm, spec.rms_epsilon)  # (T, D)
    q, k, v = kernels.matmuls((layer.q, layer.k, layer.v), x)
    q = norm_heads(q, layer.q_norm, spec.rms_epsilon, kernels)
    k = norm_heads(k, layer.k_norm, spec.rms_epsilon, kernels)
    q = kernels.rotate(as_heads(q, spec.n_heads), *rotation)  # (T, H, hd)
    k = kernels.rotate(as_heads(k, spec.n_kv_heads), *rotation)  # (T, K, hd)
    v = as_heads(v, spec.n_kv_heads)  # (T, K, hd)
    kernels.store_kv(kv, index, k, v, *where)
    mixed = kernels.attention(q, kv, index, *where)  # (T, H, hd)
    hidden += kernels.matmul(layer.attn_output, mixed.reshape(len(x), -1))  # (T, D)


def attend_some(
    kernels: Kernels,
    weights: Weights,
    index: int,
    hidden: Floats,
    wanted: Integers,
    places: Places,
    kv: KvCache,
) -> None:
    """The same for rows `wanted` of `hidden` alone; of the others only keys and values are
    written. Where no layer follows, nothing else of them is needed."""
    spec, layer = weights.spec, weights.layers[index]
    owners, positions = places.sequence_of_token, places.positions
    x = kernels.rms_norm(hidden, layer.attn_norm, spec.rms_epsilon)  # (T, D)
    k, v = kernels.matmuls((layer.k, layer.v), x)
    k = norm_heads(k, layer.k_norm, spec.rms_epsilon, kernels)
    k = kernels.rotate(as_heads(k, spec.n_kv_heads), places.cosines, places.sines)  # (T, K, hd)
    v = as_heads(v, spec.n_kv_heads)  # (T, K, hd)
    kernels.store_kv(kv, index, k, v, places.tables, owners, positions)
    if not len(wanted):
        return
    q = kernels.matmul(layer.q, x[wanted])  # (W, H * hd)
    q = norm_heads(q, layer.q_norm, spec.rms_epsilon, kernels)
    rotation = (places.cosines[wanted], places.sines[wanted])
    q = kernels.rotate(as_heads(q, spec.n_heads), *rotation)  # (W, H, hd)
    where = (places.tables, owners[wanted], positions[wanted])
    mixed = kernels.attention(q, kv, index, *where)  # (W, H, hd)
    hidden[wanted] += kernels.matmul(layer.attn_output, mixed.reshape(len(wanted), -1))  # (W, D)


def choose(
    kernels: Kernels, weights: Weights, index: int, hidden: Floats
) -> tuple[Floats, Integers, Floats]:
    """The experts of one layer: what they get (T, D), ids (T, A) ascending, weights (T, A)."""
    layer = weights.layers[index]
    x = kernels.rms_norm(hidden, layer.ffn_norm, weights.spec.rms_epsilon)  # (T, D)
    return x, *route(x, layer.router, kernels)


def route(x: Floats, router: Router, kernels: Kernels) -> tuple[Integers, Floats]:
    """The experts of each token, x (T, D): ids (T, A) ascending, and their weights (T, A)."""
    scores = kernels.matmul(router.matrix, x)  # (T, E)
    return kernels.top_experts(scores, router.n_active, router.norm_topk)


def norm_heads(x: Floats, weight: Floats | None, epsilon: float, kernels: Kernels) -> Floats:
    """Norm x (T, heads * hd) as many floats at a time as the architecture has weights: all heads of
    a token together, or each. No weights, no norm."""
    if weight is None:
        return x
    return kernels.rms_norm(x.reshape(-1, len(weight)), weight, epsilon).reshape(x.shape)


def as_heads(x: Floats, n_heads: int) -> Floats:
    """(T, n_heads * hd) -> (T, n_heads, hd), a view."""
    return x.reshape(len(x), n_heads, -1)
