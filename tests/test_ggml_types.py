"""The table of types against the package that defines it for Python."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from io_worker.ggml_types import GGML_TYPES, WEIGHT_TYPES, row_bytes


def test_types_agree_with_the_gguf_package() -> None:
    shared = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items() if kind in GGML_TYPES}
    assert len(shared) >= 30
    for kind, sizes in shared.items():
        assert (GGML_TYPES[kind].block_elements, GGML_TYPES[kind].block_bytes) == sizes


@pytest.mark.parametrize(
    ("kind", "n_elements", "n_bytes"), [(0, 7, 28), (12, 512, 288), (39, 96, 51), (8, 32, 34)]
)
def test_row_bytes(kind: int, n_elements: int, n_bytes: int) -> None:
    assert row_bytes(kind, n_elements) == n_bytes


@pytest.mark.parametrize(("kind", "n_elements"), [(12, 255), (8, 16), (31, 32), (99, 1)])
def test_row_bytes_refuses(kind: int, n_elements: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        row_bytes(kind, n_elements)


@pytest.mark.parametrize("kind", sorted(WEIGHT_TYPES & {int(k) for k in GGMLQuantizationType}))
def test_weight_types_have_a_reference(kind: int) -> None:
    block = np.zeros((1, GGML_TYPES[kind].block_bytes), np.uint8)
    assert dequantize(block, GGMLQuantizationType(kind)).size == GGML_TYPES[kind].block_elements
