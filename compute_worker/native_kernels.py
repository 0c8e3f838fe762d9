"""The C kernels behind the functions of `reference`: same names, signatures and effects.

Owns the handle of the C engine (one instruction set, its threads, its scratch) and the choice of
the instruction set. Where C has no kernel for a type or a shape, the numpy reference does that one
call, so every model runs. Nothing is computed here.

A change must keep: arrays are handed to C contiguous and of the exact type, or copied to be so.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import gguf.quants
import numpy as np

from compute_worker import reference
from compute_worker.kernels import KernelError, Kernels
from compute_worker.kv import KvCache
from compute_worker.matrix import Addresses, ExpertShape, Floats, Integers, Matrix
from compute_worker.native_layer import NativeLayers, no_scratch
from compute_worker.native_rows import RowOperations
from io_worker.ggml_types import GGML_TYPES

try:
    _kernels: Any = importlib.import_module("compute_worker.native._kernels")
except ImportError:  # `optional` at install: the reason was printed there
    _kernels = None

INSTRUCTION_SETS = ("avx512-vnni", "avx2", "neon-dotprod", "portable")  # best first
NUMERICS = {"exact": 0, "fast": 1}  # EXACT and FAST of engine.h
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml type ids
LANES = 16  # of the widest set: heads of the KV cache must be a multiple


def unavailable_reason() -> str | None:
    """None where the kernels can be used, else why not, for the first line of a run."""
    return None if _kernels is not None else "no compiler at install"


def runnable_instruction_sets() -> tuple[str, ...]:
    """Names this machine can run, best first; empty where the extension was not built."""
    if _kernels is None:
        return ()
    return tuple(name for name in INSTRUCTION_SETS if _kernels.lib.moe_can_run(name.encode()))


def build(numerics: str, n_threads: int) -> Kernels:
    """Kernels of the best instruction set of this machine. Raises `KernelError`."""
    reason = unavailable_reason()
    if reason is not None:
        raise KernelError(f"kernels: native ones do not exist here ({reason}); use --kernels numpy")
    return build_for(runnable_instruction_sets()[0], numerics, n_threads)


def build_for(instruction_set: str, numerics: str, n_threads: int) -> Kernels:
    """The same for a named instruction set. Raises `KernelError` where it cannot run here."""
    engine = Engine(instruction_set, numerics, n_threads)
    rows, layers = engine.row_operations(), engine.layers()
    return Kernels(
        name=instruction_set,
        matmul=engine.matmul,
        matmuls=engine.matmuls,
        rms_norm=rows.rms_norm,
        rotate=rows.rotate,
        top_experts=rows.top_experts,
        combine=rows.combine,
        expert_blocks=engine.expert_blocks,
        attention=engine.attention,
        store_kv=engine.store_kv,
        attend=layers.attend,
        choose=layers.choose,
        known_layers=layers.known_layers,
        read_all=engine.read_all,
        park=engine.park,
        close=engine.close,
    )


class Engine:
    """One C engine. Its methods may be called by one thread at a time."""

    def __init__(self, instruction_set: str, numerics: str, n_threads: int) -> None:
        """Starts `n_threads` - 1 threads. Raises `KernelError`."""
        self._ffi = _kernels.ffi
        self._lib = _kernels.lib
        self._numerics = NUMERICS[numerics]
        self._grids, self._grid_arrays = _grids(self._ffi)  # the arrays must live as long
        self._handle = self._lib.moe_engine_open(instruction_set.encode(), n_threads, self._grids)
        if self._handle == self._ffi.NULL:
            raise KernelError(
                f"kernels: expected {instruction_set} with {n_threads} threads to start, but this "
                "machine cannot run them; use fewer --compute-threads or --kernels numpy"
            )
        self._last_kv: tuple[KvCache, Any] | None = None
        self._types = frozenset(
            type_id for type_id in GGML_TYPES if self._lib.moe_type_is_native(self._handle, type_id)
        )

    def row_operations(self) -> RowOperations:
        """The rest of a layer; valid until `close`."""
        return RowOperations(self._ffi, self._lib, self._handle)

    def layers(self) -> NativeLayers:
        """Halves of a layer, and several layers, in one call; valid until `close`."""
        own = (self._ffi, self._lib, self._handle, self._numerics)
        return NativeLayers(*own, self._is_native, self._kv)

    def _is_native(self, head_width: int, types: frozenset[int]) -> bool:
        return head_width % LANES == 0 and types <= self._types

    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """See `reference.matmul`."""
        return self.matmuls((matrix,), x)[0]

    def matmuls(self, matrices: Sequence[Matrix], x: Floats) -> list[Floats]:
        """See `reference.matmuls`."""
        if not all(matrix.type in self._types for matrix in matrices):
            if len(matrices) == 1:
                return reference.matmuls(matrices, x)
            return [self.matmul(matrix, x) for matrix in matrices]
        x = np.ascontiguousarray(x, np.float32)
        n_tokens, n_cols = x.shape
        n_rows = [matrix.n_rows for matrix in matrices]
        out = np.empty(n_tokens * sum(n_rows), np.float32)
        failed = self._lib.moe_matmul(
            self._handle,
            self._numerics,
            len(n_rows),
            [matrix.type for matrix in matrices],
            [matrix.address for matrix in matrices],
            n_rows,
            n_cols,
            self._floats(x),
            n_tokens,
            self._floats(out),
        )
        _check(failed)
        products, start = [], 0
        for rows in n_rows:
            products.append(out[start : start + n_tokens * rows].reshape(n_tokens, rows))
            start += n_tokens * rows
        return products

    def expert_blocks(
        self,
        shape: ExpertShape,
        addresses: Addresses,
        pairs: Sequence[Integers],
        n_active: int,
        x: Floats,
        out: Floats,
    ) -> None:
        """See `reference.expert_blocks`."""
        if not self._types.issuperset((shape.gate_type, shape.up_type, shape.down_type)):
            reference.expert_blocks(shape, addresses, pairs, n_active, x, out)
            return
        x = np.ascontiguousarray(x, np.float32)
        addresses = np.ascontiguousarray(addresses, np.uint64)
        counts = list(map(len, pairs))
        if not any(counts):
            return
        flat = np.ascontiguousarray(np.concatenate(pairs), np.int32)
        assert out.flags.c_contiguous and out.dtype == np.float32
        failed = self._lib.moe_expert_blocks(
            self._handle,
            self._numerics,
            shape.gate_type,
            shape.up_type,
            shape.down_type,
            shape.width,
            shape.expert_width,
            self._ffi.from_buffer("uint64_t[]", addresses),
            len(counts),
            self._integers(flat),
            counts,
            n_active,
            self._floats(x),
            len(x),
            self._floats(out),
        )
        _check(failed)

    def attention(
        self,
        q: Floats,
        kv: KvCache,
        layer: int,
        tables: Integers,
        sequence_of_token: Integers,
        positions: Integers,
    ) -> Floats:
        """See `reference.attention`."""
        if kv.head_width % LANES:
            return reference.attention(q, kv, layer, tables, sequence_of_token, positions)
        q = np.ascontiguousarray(q, np.float32)
        out = np.empty_like(q)
        failed = self._lib.moe_attention(
            self._handle,
            self._floats(q),
            self._kv(kv),
            layer,
            q.shape[1],
            self._integers(tables),
            tables.shape[1],
            self._integers(sequence_of_token),
            self._integers(positions),
            len(q),
            self._floats(out),
        )
        _check(failed)
        return out

    def store_kv(
        self,
        kv: KvCache,
        layer: int,
        k: Floats,
        v: Floats,
        tables: Integers,
        sequence_of_token: Integers,
        positions: Integers,
    ) -> None:
        """See `reference.store_kv`."""
        if kv.head_width % LANES:
            reference.store_kv(kv, layer, k, v, tables, sequence_of_token, positions)
            return
        self._lib.moe_store_kv(
            self._handle,
            self._kv(kv),
            layer,
            self._floats(np.ascontiguousarray(k, np.float32)),
            self._floats(np.ascontiguousarray(v, np.float32)),
            self._integers(tables),
            tables.shape[1],
            self._integers(sequence_of_token),
            self._integers(positions),
            len(k),
        )

    def has_type(self, type_id: int) -> bool:
        """Whether C multiplies this ggml type; the reference does the others."""
        return type_id in self._types

    def read_all(self, data: "np.ndarray[Any, Any]") -> int:
        """Sum of all 64-bit words: how fast all threads together can read, and nothing else."""
        return int(self._lib.moe_read_all(self._handle, self._bytes(data), data.nbytes))

    def park(self) -> None:
        """Threads stop spinning; the next call wakes them."""
        self._lib.moe_engine_park(self._handle)

    def close(self) -> None:
        """Threads end; no other method may be called afterwards."""
        self._last_kv = None
        self._lib.moe_engine_close(self._handle)
        self._handle = self._ffi.NULL

    def _kv(self, kv: KvCache) -> Any:
        """The cache as C sees it; the last one asked for is kept."""
        if self._last_kv is None or self._last_kv[0] is not kv:
            n_layers, n_kv_heads = kv.data.shape[1], kv.data.shape[3]
            fields = (self._bytes(kv.data), KV_TYPES[kv.kind], n_layers, n_kv_heads, kv.head_width)
            self._last_kv = kv, self._ffi.new("moe_kv *", fields)
        return self._last_kv[1]

    def _bytes(self, array: "np.ndarray[Any, Any]") -> Any:
        return self._ffi.from_buffer("uint8_t[]", array)

    def _floats(self, array: Floats) -> Any:
        return self._ffi.from_buffer("float[]", array)

    def _integers(self, array: Integers) -> Any:
        """Indices are small: a copy where they are not int32 and contiguous costs nothing."""
        return self._ffi.from_buffer("int32_t[]", np.ascontiguousarray(array, np.int32))


def _check(failed: int) -> None:
    if failed:
        raise no_scratch()


def _grids(ffi: Any) -> tuple[Any, list["np.ndarray[Any, Any]"]]:
    """Look-up tables of the IQ2 and IQ3 types, as the C struct, and the arrays that hold them.

    gguf packs them as the C code wants them: 16 bits per index, in hexadecimal.
    """
    arrays = []
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        packed = bytes.fromhex(getattr(gguf.quants, name).grid_hex.decode("ascii"))
        arrays.append(np.append(np.frombuffer(packed, np.dtype("<u2")), np.uint16(0)))
    return ffi.new("moe_grids *", [ffi.from_buffer("uint16_t[]", a) for a in arrays]), arrays
