"""The dense halves of a layer, each in one call of C, behind the functions of `dense_layer`.

Owns what C is told of a layer and of the places of a batch: both are built once and kept, a layer
for good, places until the next ones come. So a call costs a few microseconds of Python. A model
that C has no kernels for goes through `dense_layer`, operation by operation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from compute_worker import dense_layer
from compute_worker.kernels import Kernels, Places
from compute_worker.kv import KvCache
from compute_worker.matrix import Floats, Integers, aligned_floats
from compute_worker.native_rows import MOST_EXPERTS
from compute_worker.weights import Layer, Weights


class DenseLayers:
    """Functions of one C engine. One thread at a time, as for the engine itself."""

    def __init__(
        self,
        ffi: Any,
        lib: Any,
        handle: Any,
        numerics: int,
        is_native: Callable[[int, frozenset[int]], bool],
        c_kv: Callable[[KvCache], Any],
    ) -> None:
        """`is_native(head_width, types)`: C has kernels for them; `c_kv`: a cache for C."""
        self._ffi = ffi
        self._lib = lib
        self._handle = handle
        self._numerics = numerics
        self._is_native = is_native
        self._c_kv = c_kv
        self._layers: dict[Layer, Any] = {}  # None: not for C
        self._last_places: tuple[Places, Any, list[Any]] | None = None
        # Kept: the system would have to clear the pages of a new one for every layer of a prompt
        self._scratch = aligned_floats(1, 0)

    def attend(
        self,
        kernels: Kernels,
        weights: Weights,
        index: int,
        hidden: Floats,
        places: Places,
        kv: KvCache,
    ) -> None:
        """See `dense_layer.attend`."""
        layer = self._layer(weights, index)
        if layer is None:
            dense_layer.attend(kernels, weights, index, hidden, places, kv)
            return
        assert hidden.dtype == np.float32
        n_floats = self._lib.moe_attend_floats(layer, len(hidden))
        if n_floats > self._scratch.size:
            self._scratch = aligned_floats(1, n_floats)
        failed = self._lib.moe_attend(
            self._handle,
            self._numerics,
            layer,
            self._c_kv(kv),
            index,
            self._places(places),
            self._floats(hidden),
            self._floats(self._scratch),
        )
        if failed:
            raise no_scratch()

    def choose(
        self, kernels: Kernels, weights: Weights, index: int, hidden: Floats
    ) -> tuple[Floats, Integers, Floats]:
        """See `dense_layer.choose`."""
        layer = self._layer(weights, index)
        if layer is None:
            return dense_layer.choose(kernels, weights, index, hidden)
        assert hidden.dtype == np.float32
        n_tokens, spec = len(hidden), weights.spec
        x = np.empty_like(hidden)
        scores = np.empty((n_tokens, spec.n_experts), np.float32)
        chosen = np.empty((n_tokens, spec.n_active), np.int32)
        shares = np.empty((n_tokens, spec.n_active), np.float32)
        failed = self._lib.moe_choose(
            self._handle,
            self._numerics,
            layer,
            self._floats(hidden),
            n_tokens,
            self._floats(x),
            self._floats(scores),
            self._integers(chosen),
            self._floats(shares),
        )
        if failed:
            raise no_scratch()
        return x, chosen, shares

    def _layer(self, weights: Weights, index: int) -> Any:
        """The layer as C sees it, or None."""
        layer = weights.layers[index]
        if layer not in self._layers:
            self._layers[layer] = self._describe(weights, layer)
        return self._layers[layer]

    def _describe(self, weights: Weights, layer: Layer) -> Any:
        spec, inputs = weights.spec, (layer.q, layer.k, layer.v)
        output, router = layer.attn_output, layer.router
        types = frozenset(matrix.type for matrix in (*inputs, output, router.matrix))
        if spec.n_experts > MOST_EXPERTS or not self._is_native(spec.head_width, types):
            return None
        return self._ffi.new(
            "moe_layer *",
            {
                "attn_norm": self._weight(layer.attn_norm),
                "q_norm": self._weight(layer.q_norm),
                "k_norm": self._weight(layer.k_norm),
                "ffn_norm": self._weight(layer.ffn_norm),
                "types": [matrix.type for matrix in inputs],
                "n_rows": [matrix.n_rows for matrix in inputs],
                "weights": [matrix.address for matrix in inputs],
                "output_type": output.type,
                "router_type": router.matrix.type,
                "output": output.address,
                "router": router.matrix.address,
                "q_norm_width": 0 if layer.q_norm is None else len(layer.q_norm),
                "k_norm_width": 0 if layer.k_norm is None else len(layer.k_norm),
                "width": spec.width,
                "n_heads": spec.n_heads,
                "n_kv_heads": spec.n_kv_heads,
                "head_width": spec.head_width,
                "n_experts": spec.n_experts,
                "n_active": router.n_active,
                "norm_topk": router.norm_topk,
                "epsilon": spec.rms_epsilon,
            },
        )

    def _places(self, places: Places) -> Any:
        """The places as C sees them; the last ones asked for are kept."""
        if self._last_places is None or self._last_places[0] is not places:
            of_tokens = (places.tables, places.sequence_of_token, places.positions)
            arrays: list[Any] = [np.ascontiguousarray(each, np.int32) for each in of_tokens]
            angles: list[Any] = [places.cosines, places.sines]
            fields = [*map(self._integers, arrays), *map(self._floats, angles)]
            fields += [places.tables.shape[1], places.cosines.shape[1], len(places.positions)]
            struct = self._ffi.new("moe_places *", fields)
            self._last_places = places, struct, [*arrays, *angles]
        return self._last_places[1]

    def _weight(self, array: Floats | None) -> Any:
        return self._ffi.NULL if array is None else self._floats(array)

    def _floats(self, array: Floats) -> Any:
        return self._ffi.from_buffer("float[]", array)

    def _integers(self, array: Integers) -> Any:
        return self._ffi.from_buffer("int32_t[]", array)


def no_scratch() -> MemoryError:
    """What a call of C reports that found no memory for its scratch."""
    return MemoryError("kernels: no memory for scratch; lower --memory or the prompt chunk")
