"""Random weights of any ggml type, for tests: the bytes of a matrix, of a known deviation."""

import math

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

# Where a block keeps its half floats, and each one's share of the block's scale. A minimum of
# minus half the range (Q4_K subtracts it, Q4_1 adds it) gives weights around zero.
_HALF_FLOATS: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1.0),),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_0": ((0, 1.0),),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "IQ2_XXS": ((0, 1.0),),
    "IQ2_XS": ((0, 1.0),),
    "IQ2_S": ((0, 1.0),),
    "IQ3_XXS": ((0, 1.0),),
    "IQ3_S": ((0, 1.0),),
    "IQ1_S": ((0, 1.0),),
    "IQ4_NL": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
    "TQ1_0": ((52, 1.0),),
    "TQ2_0": ((64, 1.0),),
}

Bytes = npt.NDArray[np.uint8]


def _set_scale(blocks: Bytes, type_name: str, scale: float) -> None:
    for at, share in _HALF_FLOATS[type_name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale * share).tobytes(), np.uint8)


def random_matrix(
    type_name: str, n_rows: int, n_cols: int, deviation: float, rng: np.random.Generator
) -> Bytes:
    """Random weights of a ggml type as uint8 rows (n_rows, bytes), of about this deviation.

    Quantised types get random blocks, not quantised weights: the package cannot quantise most of
    them, and any block is a legal one. One scale for all, found by dequantising a sample.
    """
    kind = GGMLQuantizationType[type_name]
    if type_name in ("F32", "F16", "BF16"):
        floats = rng.standard_normal((n_rows, n_cols), np.float32) * np.float32(deviation)
        return quantize(floats, kind).view(np.uint8).reshape(n_rows, -1)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    assert n_cols % block_elements == 0, (type_name, n_cols)
    n_blocks = n_rows * n_cols // block_elements
    blocks = rng.integers(0, 256, (n_blocks, block_bytes), np.uint8)
    if type_name == "MXFP4":  # byte 0 is an exponent, 127 for one; 2.93 is the values' deviation
        blocks[:, 0] = 127 + round(math.log2(deviation / 2.93))
    else:
        _set_scale(blocks, type_name, 2.0**-5)
        sample = dequantize(blocks[:64].reshape(1, -1), kind)
        _set_scale(blocks, type_name, 2.0**-5 * deviation / float(sample.std()))
    return blocks.reshape(n_rows, -1)
