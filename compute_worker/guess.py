"""Guesses the experts of the next layer: its router, applied one layer early.

The state that reaches layer l's experts differs from the one that will reach layer l + 1's by what
attention and experts add in between, which is little: the guess is right for some 70 to 90 %. It
costs one small matrix per layer. A guess decides nothing here; it travels in `Need`.
"""

import numpy as np

from compute_worker.dense_layer import route
from compute_worker.kernels import Kernels
from compute_worker.matrix import Floats
from compute_worker.weights import Weights


class RouterGuess:
    """The next layer's experts of a single token, likeliest first."""

    def __init__(self, weights: Weights, kernels: Kernels) -> None:
        self._layers = weights.layers
        self._kernels = kernels
        # x is normalised with this layer's weight; the next router expects its own
        self._rescale = [
            np.divide(
                after.ffn_norm,
                now.ffn_norm,
                where=now.ffn_norm != 0,
                out=np.zeros_like(now.ffn_norm),
            )
            for now, after in zip(weights.layers, weights.layers[1:], strict=False)
        ]

    def __call__(self, layer: int, x: Floats) -> tuple[int, ...]:
        """x (1, D), as `layer` sees it -> ids; none after the last layer or for several tokens."""
        if len(x) != 1 or layer >= len(self._rescale):
            return ()
        chosen, shares = route(
            x * self._rescale[layer], self._layers[layer + 1].router, self._kernels
        )
        order = np.argsort(-shares[0], kind="stable")
        return tuple(chosen[0][order].tolist())
