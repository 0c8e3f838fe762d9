"""Layers one after the other, from attention to the sum of the experts, without a word to anybody,
as far as the experts they choose are known.

This is their definition, from the operations of `Kernels`; one call for all of them
(`native_layer`) does the same operations in the same order: no bit differs.

Shapes: T tokens, D model width, E experts, A active experts, L layers of the model.
"""

import time

import numpy as np

from compute_worker.guess import guess_of
from compute_worker.kernels import Kernels, LayerRun, Places
from compute_worker.known_experts import addresses_of, may_be_used
from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, Floats, expert_shape, group_by_expert
from compute_worker.weights import Weights


def known_layers(
    kernels: Kernels,
    weights: Weights,
    layers: range,
    hidden: Floats,
    places: Places,
    kv: KvCache,
    entries: Addresses,
    n_guesses: int,
) -> LayerRun:
    """Apply `layers` to `hidden` (T, D), in place. Writes their keys and values.

    entries (L, E, 6): see `KnownExperts`; the bytes of what is known stay in their place meanwhile.
    It ends at the first layer that chose an expert which is not known, or at which one is guessed
    for the next of these layers: of that layer attention is done, and the run tells the choice.
    `n_guesses`: guesses per layer, none with more than one token.
    """
    spec = weights.spec
    every_choice = np.empty((len(layers), len(hidden), spec.n_active), np.int32)
    guesses: list[tuple[int, ...]] = []
    experts_ns = 0
    for n_done, index in enumerate(layers):
        kernels.attend(kernels, weights, index, hidden, places, kv)
        x, chosen, shares = kernels.choose(kernels, weights, index, hidden)
        guessed: tuple[int, ...] = ()
        if n_guesses and index + 1 in layers:
            guessed = guess_of(kernels, weights, index + 1, hidden, n_guesses)
        guesses.append(guessed)
        pairs = group_by_expert(chosen)
        used = entries[index, list(pairs)]  # (n, 6)
        has_guesses = all(entries[index + 1, expert, 0] for expert in guessed)
        if not has_guesses or not may_be_used(used):
            unknown = (x, chosen, shares)
            return LayerRun(layers[:n_done], every_choice[:n_done], experts_ns, unknown, guesses)
        started_ns = time.monotonic_ns()
        out = np.empty((chosen.size, x.shape[1]), np.float32)  # (T*A, D)
        shape = expert_shape(spec.slabs.layers[index])
        wanted = list(pairs.values())
        kernels.expert_blocks(shape, addresses_of(used), wanted, spec.n_active, x, out)
        hidden += kernels.combine(out, shares)  # (T, D)
        experts_ns += time.monotonic_ns() - started_ns
        every_choice[n_done] = chosen
    return LayerRun(layers, every_choice, experts_ns, None, guesses)
