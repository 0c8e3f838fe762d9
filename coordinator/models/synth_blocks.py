"""Random weights as the bytes of ggml blocks, of a chosen standard deviation.

All bits of a block that hold quants are random; its scales are fixed, so that the weights have mean
0 and the wanted deviation. The numbers here are deviations of uniform quants: 4.61 for 0..15, 18.5
for -32..31, 1.118 for 0..3, 2.29 for -4..3, 73.9 for -128..127, 2.93 for the values of MXFP4. No
numpy: the command line does not import it.
"""

import math
import random
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist

from io_worker.ggml_types import GgmlType

PIECE_BYTES = 4 * 1024 * 1024  # written at a time: large for the disk, small for memory
N_QUANTILES = 65536  # values that two random bytes can choose: normal to four digits

Stamps = list[tuple[int, int]]  # offset in the block, byte


def random_weights(
    kind: GgmlType, n_elements: int, deviation: float | None, rng: random.Random
) -> Iterator[bytes]:
    """The bytes of so many weights, in pieces; `deviation` None: all ones (F32 only)."""
    if kind.name == "F32":
        yield from _floats(n_elements, deviation, rng)
        return
    assert deviation is not None and n_elements % kind.block_elements == 0, (kind, n_elements)
    n_left = n_elements // kind.block_elements
    if kind.name == "MXFP4":
        exponents = _exponents(deviation / 2.93)
    else:
        stamps = STAMPS[kind.name](deviation)
    while n_left:
        n_blocks = min(n_left, PIECE_BYTES // kind.block_bytes)
        piece = bytearray(rng.randbytes(n_blocks * kind.block_bytes))
        if kind.name == "MXFP4":
            piece[:: kind.block_bytes] = piece[:: kind.block_bytes].translate(exponents)
        else:
            for offset, byte in stamps:
                piece[offset :: kind.block_bytes] = bytes([byte]) * n_blocks
        n_left -= n_blocks
        yield bytes(piece)


def _floats(n_elements: int, deviation: float | None, rng: random.Random) -> Iterator[bytes]:
    if deviation is None:
        yield array("f", [1.0]).tobytes() * n_elements
        return
    normal = NormalDist(0.0, deviation)
    quantile = array("f", [normal.inv_cdf((i + 0.5) / N_QUANTILES) for i in range(N_QUANTILES)])
    while n_elements:
        n = min(n_elements, PIECE_BYTES // 4)
        yield array("f", map(quantile.__getitem__, array("H", rng.randbytes(2 * n)))).tobytes()
        n_elements -= n


def _half(offset: int, value: float) -> Stamps:
    low, high = struct.pack("<e", value)
    return [(offset, low), (offset + 1, high)]


def _fill(start: int, stop: int, byte: int) -> Stamps:
    return [(offset, byte) for offset in range(start, stop)]


def _q2_k(deviation: float) -> Stamps:
    """16 bytes of scale and minimum nibbles, 64 of pairs, d, dmin."""
    d = deviation / (8 * 1.118)
    return _fill(0, 16, 8 | 8 << 4) + _half(80, d) + _half(82, 1.5 * d)


def _q3_k(deviation: float) -> Stamps:
    """32 bytes of high bits, 64 of pairs, 12 of 6-bit scales above a bias of 32, d.

    Quants go from -4 to 3, so scales of +8 and -8 take turns: together they have no mean.
    """
    low_bits = _fill(96, 104, 8 | 8 << 4)
    high_bits = [(104, 0xAA), (105, 0x55), (106, 0xAA), (107, 0x55)]
    return low_bits + high_bits + _half(108, deviation / (8 * 2.29))


def _q4_k(deviation: float) -> Stamps:
    """d, dmin, 12 bytes of 6-bit scales and minimums (all 32), 128 of nibbles."""
    d = deviation / (32 * 4.61)
    return _half(0, d) + _half(2, 7.5 * d) + _fill(4, 12, 32 | 2 << 6) + _fill(12, 16, 0)


def _q6_k(deviation: float) -> Stamps:
    """128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d."""
    return _fill(192, 208, 16) + _half(208, deviation / (18.5 * 16))


def _q8_0(deviation: float) -> Stamps:
    """d, 32 int8."""
    return _half(0, deviation / 73.9)


STAMPS: Mapping[str, Callable[[float], Stamps]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}


def _exponents(scale: float) -> bytes:
    """For each random byte the scale byte of an MXFP4 block, a power of two (127 is 1).

    Two neighbouring powers are mixed so that the mean of their squares is that of `scale`.
    """
    exponent = math.floor(math.log2(scale))
    share = ((scale / 2.0**exponent) ** 2 - 1) / 3  # of blocks with the larger power
    return bytes(127 + exponent + (byte < round(share * 256)) for byte in range(256))
