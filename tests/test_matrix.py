"""Rows of every weight type as float32, and matrices at an address."""

import gguf
import numpy as np
import pytest
from random_weights import random_matrix

from compute_worker.matrix import ExpertShape, Matrix, dequantise, matrix_at

Q8_0, F32 = 8, 0


def test_q8_0_by_hand() -> None:
    row = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    values = dequantise(np.frombuffer(row * 2, np.uint8), Q8_0, 32)
    assert values.shape == (2, 32) and values.dtype == np.float32
    assert (values == np.arange(-16, 16) * 0.5).all()


def test_rows_do_not_depend_on_how_many_are_asked_for() -> None:
    data = random_matrix("Q6_K", 37, 512, 1.0, np.random.default_rng(1))
    whole = dequantise(data, 14, 512)
    for start in range(37):
        assert (dequantise(data[start : start + 3], 14, 512) == whole[start : start + 3]).all()


def test_hostile_scales_raise_no_warning() -> None:
    data = np.full((2, 34), 0xFF, np.uint8)  # an f16 NaN
    assert np.isnan(dequantise(data, Q8_0, 32)).all()
    data[:, 1] = 0x7C
    data[:, 0] = 0  # infinity
    assert np.isinf(dequantise(data, Q8_0, 32)).all()


def test_types_that_are_no_weights_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        dequantise(np.zeros(8, np.uint8), int(gguf.GGMLQuantizationType.I32), 2)


def test_a_matrix_at_an_address_is_a_view() -> None:
    data = np.arange(8, dtype=np.float32)
    matrix = Matrix(data.view(np.uint8), F32, 2, 4)
    same = matrix_at(matrix.address, F32, 2, 4)
    data[5] = 50
    assert same.address == matrix.address
    assert dequantise(same.data, F32, 4).tolist() == [[0, 1, 2, 3], [4, 50, 6, 7]]


def test_matrices_of_an_expert() -> None:
    shape = ExpertShape(gate_type=8, up_type=2, down_type=14, width=512, expert_width=256)
    assert shape.matrices() == ((8, 256, 512), (2, 256, 512), (14, 512, 256))
