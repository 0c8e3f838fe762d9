"""How ggml stores numbers: for each type, how many elements share a block and how long a block is.

The table is the layout of the format (ids and sizes as in ggml's `ggml.h` and the block structs of
`ggml-common.h`); a test compares it with the `gguf` package. It knows nothing of what the bytes of
a block mean. Rows are whole blocks: a row of n elements needs n divisible by `block_elements`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type: `block_elements` values are stored together in `block_bytes` bytes."""

    id: int
    name: str
    block_elements: int
    block_bytes: int


_TYPES = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 40),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
)

GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType({kind.id: kind for kind in _TYPES})

# Q8_1 and Q8_K exist for activations only, integers and F64 never hold a layer's weights, and for
# Q1_0 there is no reference to compute with.
_NO_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}
WEIGHT_TYPES = frozenset([kind.id for kind in _TYPES if kind.name not in _NO_WEIGHTS])


def row_bytes(type_id: int, n_elements: int) -> int:
    """Bytes of one row of `n_elements`; ValueError for an unknown type or a broken block."""
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise ValueError(f"ggml type: expected a known id, found {type_id}")
    n_blocks, rest = divmod(n_elements, kind.block_elements)
    if rest:
        raise ValueError(
            f"{kind.name} row: expected a multiple of {kind.block_elements} elements, "
            f"found {n_elements}"
        )
    return n_blocks * kind.block_bytes
