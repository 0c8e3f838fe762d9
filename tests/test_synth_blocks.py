import random

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from coordinator.models.synth_blocks import STAMPS, random_weights
from io_worker.ggml_types import GGML_TYPES, GgmlType

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}


def weights(kind: GgmlType, n: int, deviation: float | None, seed: int = 0) -> np.ndarray:
    data = b"".join(random_weights(kind, n, deviation, random.Random(seed)))
    assert len(data) == n // kind.block_elements * kind.block_bytes
    return dequantize(np.frombuffer(data, np.uint8), GGMLQuantizationType(kind.id)).ravel()


@pytest.mark.parametrize("name", ["F32", "MXFP4", *STAMPS])
@pytest.mark.parametrize("deviation", [0.02, 0.165, 0.5])
def test_weights_have_the_wanted_deviation_and_no_mean(name: str, deviation: float) -> None:
    found = weights(KINDS[name], 256 * 4096, deviation)
    assert np.isfinite(found).all()
    assert abs(found.std() / deviation - 1) < 0.03  # half floats and 1/256 steps round
    assert abs(found.mean()) < 0.04 * deviation  # quants of Q6_K and Q8_0 have one more below 0


def test_ones() -> None:
    assert (weights(KINDS["F32"], 1000, None) == 1).all()


def test_float_weights_are_normal() -> None:
    found = weights(KINDS["F32"], 1 << 18, 2.0)
    inside = [(np.abs(found) < 2.0 * k).mean() for k in (1, 2, 3)]
    assert np.allclose(inside, [0.6827, 0.9545, 0.9973], atol=0.003)


def test_pieces_are_small_and_the_seed_decides() -> None:
    kind = KINDS["Q4_K"]
    pieces = list(random_weights(kind, 256 * 100_000, 0.02, random.Random(1)))
    assert max(map(len, pieces)) <= 4 * 1024 * 1024
    assert len(pieces) == 4
    again = list(random_weights(kind, 256 * 100_000, 0.02, random.Random(1)))
    other = list(random_weights(kind, 256 * 100_000, 0.02, random.Random(2)))
    assert pieces == again != other
