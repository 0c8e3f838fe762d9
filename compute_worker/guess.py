"""Guesses the experts of the next layer: its router, applied one layer early.

The state that reaches layer l's experts differs from the one that will reach layer l + 1's by what
attention and experts add in between, which is little: the guess is right for some 70 to 90 %. It
costs one small matrix per layer. A guess decides nothing here; it is told to the coordinator.
"""

import numpy as np

from compute_worker.kernels import Kernels
from compute_worker.matrix import Floats
from compute_worker.weights import Weights


def guess_of(
    kernels: Kernels, weights: Weights, layer: int, hidden: Floats, n: int
) -> tuple[int, ...]:
    """At most `n` experts of `layer`, likeliest first; `hidden` (1, D) is what reaches the experts
    of the layer before it."""
    _, chosen, shares = kernels.choose(kernels, weights, layer, hidden)
    order = np.argsort(-shares[0], kind="stable")[:n]
    return tuple(chosen[0][order].tolist())
