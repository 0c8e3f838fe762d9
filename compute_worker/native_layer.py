"""The dense halves of a layer, each in one call of C, behind the functions of `dense_layer`; and
layers as far as their experts are known, all in one call, behind `known_layers`.

Owns what C is told of a layer and of the places of a batch: both are built once and kept, a layer
for good, places until the next ones come. So a call costs a few microseconds of Python. A model
that C has no kernels for goes through `dense_layer`, operation by operation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from compute_worker import dense_layer
from compute_worker.kernels import Kernels, LayerRun, Places
from compute_worker.known_layers import known_layers
from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, Floats, Integers, aligned_floats, expert_shape
from compute_worker.native_rows import MOST_EXPERTS
from compute_worker.weights import Layer, Weights


class NativeLayers:
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
        self._last_weights: tuple[Weights, Any] | None = None
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
        scratch = self._scratch_of(self._lib.moe_attend_floats(layer, len(hidden)))
        failed = self._lib.moe_attend(
            self._handle,
            self._numerics,
            layer,
            self._c_kv(kv),
            index,
            self._places(places),
            self._floats(hidden),
            self._floats(scratch),
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

    def known_layers(
        self,
        kernels: Kernels,
        weights: Weights,
        layers: range,
        hidden: Floats,
        places: Places,
        kv: KvCache,
        entries: Addresses,
        n_guesses: int,
    ) -> LayerRun:
        """See `known_layers.known_layers`."""
        all_layers = self._all(weights)
        if all_layers is None:
            where = (hidden, places, kv, entries, n_guesses)
            return known_layers(kernels, weights, layers, *where)
        assert hidden.dtype == np.float32 and hidden.flags.c_contiguous
        assert entries.flags.c_contiguous and layers.step == 1
        n_tokens, n_active = len(hidden), weights.spec.n_active
        x = aligned_floats(*hidden.shape)
        chosen = np.empty((len(layers), n_tokens, n_active), np.int32)
        shares = np.empty((n_tokens, n_active), np.float32)
        n_guesses = min(n_guesses, n_active)
        guesses = np.empty((len(layers), n_active), np.int32)
        span = (all_layers, layers.start, layers.stop)
        scratch = self._scratch_of(self._lib.moe_layers_floats(*span, n_tokens))
        report = self._ffi.new("moe_layers_report *")
        failed = self._lib.moe_layers(
            self._handle,
            self._numerics,
            *span,
            self._ffi.from_buffer("moe_known_expert[]", entries),
            self._c_kv(kv),
            self._places(places),
            self._floats(hidden),
            self._floats(scratch),
            self._floats(x),
            self._integers(chosen),
            self._floats(shares),
            n_guesses,
            self._integers(guesses),
            report,
        )
        if failed:
            raise no_scratch()
        done = range(layers.start, report.next_layer)
        unknown = None
        if done.stop < layers.stop:
            unknown = (x, chosen[len(done)], shares)
        rows = guesses[: len(done) + 1, :n_guesses].tolist()
        told = [
            tuple(row) if i + 1 < layers.stop else () for i, row in zip(layers, rows, strict=False)
        ]
        experts_ns = int(report.experts_nanoseconds)
        return LayerRun(done, chosen[: len(done)], experts_ns, unknown, told)

    def _scratch_of(self, n_floats: int) -> Floats:
        """So many floats of anything, at least; valid until the next call."""
        if n_floats > self._scratch.size:
            self._scratch = aligned_floats(1, n_floats)
        return self._scratch

    def _all(self, weights: Weights) -> Any:
        """All layers of a model as C sees them, or None where one is not for C."""
        if self._last_weights is None or self._last_weights[0] is not weights:
            layers = [self._layer(weights, index) for index in range(len(weights.layers))]
            shapes = [expert_shape(slabs) for slabs in weights.spec.slabs.layers]
            types = frozenset(t for s in shapes for t in (s.gate_type, s.up_type, s.down_type))
            are_for_c = None not in layers and self._is_native(weights.spec.head_width, types)
            found = self._ffi.new("moe_layer *[]", layers) if are_for_c else None
            self._last_weights = weights, found
        return self._last_weights[1]

    def _layer(self, weights: Weights, index: int) -> Any:
        """The layer as C sees it, or None."""
        layer = weights.layers[index]
        if layer not in self._layers:
            self._layers[layer] = self._describe(weights, index)
        return self._layers[layer]

    def _describe(self, weights: Weights, index: int) -> Any:
        spec, layer = weights.spec, weights.layers[index]
        inputs, experts = (layer.q, layer.k, layer.v), expert_shape(spec.slabs.layers[index])
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
                "gate_type": experts.gate_type,
                "up_type": experts.up_type,
                "down_type": experts.down_type,
                "expert_width": experts.expert_width,
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
