"""A weight matrix as bytes in memory, the shape of an expert, and which tokens it is for: what
kernels are handed.

Nothing here knows where the bytes came from. A row is `n_cols` weights of one ggml type, packed in
blocks; rows follow each other without gaps. Rows are outputs: ``y = matrix @ x``.
"""

import ctypes
from dataclasses import dataclass

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

from io_worker.ggml_types import row_bytes
from io_worker.slabs import LayerSlabs

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
CACHE_LINE_FLOATS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """``n_rows`` rows of ``n_cols`` weights; `data` is contiguous and keeps the memory alive."""

    data: Bytes
    type: int
    n_rows: int
    n_cols: int

    @property
    def address(self) -> int:
        """Address of the first byte, valid while `data` lives."""
        return int(self.data.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """gate and up are (F, D), down is (D, F); each has its own type."""

    gate_type: int
    up_type: int
    down_type: int
    width: int
    expert_width: int

    def matrices(self) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
        """(type, n_rows, n_cols) of gate, up and down."""
        return (
            (self.gate_type, self.expert_width, self.width),
            (self.up_type, self.expert_width, self.width),
            (self.down_type, self.width, self.expert_width),
        )


def expert_shape(layer: LayerSlabs) -> ExpertShape:
    """That of the experts of a layer."""
    gate, up, down = layer.gate, layer.up, layer.down
    return ExpertShape(gate.type, up.type, down.type, gate.n_cols, gate.n_rows)


def matrix_at(address: int, type_id: int, n_rows: int, n_cols: int) -> Matrix:
    """The matrix whose bytes begin at `address`, without a copy; the caller keeps them alive."""
    n_bytes = n_rows * row_bytes(type_id, n_cols)
    data = np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), np.uint8)
    return Matrix(data, type_id, n_rows, n_cols)


@np.errstate(all="ignore")  # a hostile file may hold NaN or infinite scales
def dequantise(data: Bytes, type_id: int, n_cols: int) -> Floats:
    """Whole rows of bytes as float32 (rows, n_cols); a view for F32. Raises for types that are no
    weights (`arch.WEIGHT_TYPES` are)."""
    rows = data.reshape(-1, row_bytes(type_id, n_cols))
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type_id)).reshape(-1, n_cols)


def aligned_floats(n_rows: int, n_columns: int) -> Floats:
    """(n_rows, n_columns) of anything, from the start of a cache line on: a vector that is written
    there touches one line, where it would touch two and wait for both."""
    raw = np.empty(n_rows * n_columns + CACHE_LINE_FLOATS, np.float32)
    first = -(raw.__array_interface__["data"][0] // raw.itemsize) % CACHE_LINE_FLOATS
    return raw[first : first + n_rows * n_columns].reshape(n_rows, n_columns)


def group_by_expert(chosen: Integers) -> dict[int, Integers]:
    """For each expert that `chosen` (T, A) names, ascending: its pairs ``token * A + place``,
    ascending. These are the rows of `out` that `expert_blocks` writes and `combine` adds."""
    flat = chosen.ravel()
    if len(chosen) == 1:  # one token: its experts are different and ascending, and time counts
        return dict(zip(flat.tolist(), np.arange(flat.size, dtype=np.int32)[:, None], strict=True))
    order = np.argsort(flat, kind="stable").astype(np.int32)
    experts, starts = np.unique(flat[order], return_index=True)
    return dict(zip(experts.tolist(), np.split(order, starts[1:]), strict=True))
