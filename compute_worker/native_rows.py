"""Norms, rotation, choice and sum of experts in C, behind the functions of `reference`.

Row by row, on the threads of the engine that made this. It holds no memory of its own.
"""

from typing import Any

import numpy as np

from compute_worker import reference
from compute_worker.matrix import Floats, Integers

MOST_EXPERTS = 1024  # MOE_MAX_EXPERTS of engine.h


class RowOperations:
    """Functions of one C engine. One thread at a time, as for the engine itself."""

    def __init__(self, ffi: Any, lib: Any, handle: Any) -> None:
        self._ffi = ffi
        self._lib = lib
        self._handle = handle

    def rms_norm(self, x: Floats, weight: Floats, epsilon: float) -> Floats:
        """See `reference.rms_norm`."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty_like(x)
        n_rows, n_columns = x.shape
        self._lib.moe_rms_norm(
            self._handle,
            self._floats(x),
            self._floats(weight),
            n_rows,
            n_columns,
            epsilon,
            self._floats(out),
        )
        return out

    def rotate(self, x: Floats, cosines: Floats, sines: Floats) -> Floats:
        """See `reference.rotate`."""
        assert x.flags.c_contiguous and x.dtype == np.float32
        self._lib.moe_rotate(
            self._handle,
            self._floats(x),
            *x.shape,
            self._floats(cosines),
            self._floats(sines),
            cosines.shape[1],
        )
        return x

    def top_experts(
        self, scores: Floats, n_active: int, norm_topk: bool
    ) -> tuple[Integers, Floats]:
        """See `reference.top_experts`."""
        n_tokens, n_experts = scores.shape
        if n_experts > MOST_EXPERTS:
            return reference.top_experts(scores, n_active, norm_topk)
        scores = np.ascontiguousarray(scores, np.float32)
        chosen = np.empty((n_tokens, n_active), np.int32)
        weights = np.empty((n_tokens, n_active), np.float32)
        self._lib.moe_top_experts(
            self._handle,
            self._floats(scores),
            n_tokens,
            n_experts,
            n_active,
            norm_topk,
            self._integers(chosen),
            self._floats(weights),
        )
        return chosen, weights

    def combine(self, out: Floats, weights: Floats) -> Floats:
        """See `reference.combine`."""
        n_tokens, n_active = weights.shape
        width = out.shape[1]
        assert out.flags.c_contiguous and out.dtype == np.float32
        weights = np.ascontiguousarray(weights, np.float32)
        self._lib.moe_combine(
            self._handle, self._floats(out), self._floats(weights), n_tokens, n_active, width
        )
        return out[::n_active]

    def _floats(self, array: Floats) -> Any:
        return self._ffi.from_buffer("float[]", array)

    def _integers(self, array: Integers) -> Any:
        return self._ffi.from_buffer("int32_t[]", array)
