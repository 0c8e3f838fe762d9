"""Layers whose experts all stand, from attention to the sum of the experts, without a word to
anybody between two of them.

This is their definition, from the operations of `Kernels`; a call for all of them (`native_layer`)
does the same operations in the same order: no bit differs.

Shapes: T tokens, D model width, E experts, A active experts, L layers of the model.
"""

import time

import numpy as np

from compute_worker.kernels import Kernels, LayerRun, Places
from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, Floats, expert_shape, group_by_expert
from compute_worker.weights import Weights


def whole_layers(
    kernels: Kernels,
    weights: Weights,
    layers: range,
    hidden: Floats,
    places: Places,
    kv: KvCache,
    addresses: Addresses,
) -> LayerRun:
    """Apply `layers` to `hidden` (T, D), in place. Writes their keys and values.

    addresses (L, E, 3): byte addresses of gate, up, down of every expert of these layers, whose
    bytes the caller keeps in place.
    """
    spec = weights.spec
    every_choice = []
    n_uses = experts_ns = 0
    for index in layers:
        kernels.attend(kernels, weights, index, hidden, places, kv)
        x, chosen, shares = kernels.choose(kernels, weights, index, hidden)
        started_ns = time.monotonic_ns()
        pairs = group_by_expert(chosen)
        out = np.empty((chosen.size, x.shape[1]), np.float32)  # (T*A, D)
        shape = expert_shape(spec.slabs.layers[index])
        used = addresses[index][list(pairs)]
        kernels.expert_blocks(shape, used, list(pairs.values()), spec.n_active, x, out)
        hidden += kernels.combine(out, shares)  # (T, D)
        experts_ns += time.monotonic_ns() - started_ns
        every_choice.append(chosen)
        n_uses += len(pairs)
    return LayerRun(np.stack(every_choice), n_uses, experts_ns)
