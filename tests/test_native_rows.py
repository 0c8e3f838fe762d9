"""Norms, rotation, choice and sum of experts in C: against numpy, and bit for bit by themselves."""

from collections.abc import Iterator

import numpy as np
import pytest

from compute_worker import reference
from compute_worker.kernels import Kernels
from compute_worker.matrix import Floats
from compute_worker.native_kernels import build_for, runnable_instruction_sets, unavailable_reason

SETS = runnable_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"native kernels: {unavailable_reason()}")
LENGTHS = (1, 15, 16, 60, 64, 100, 128, 2048)


@pytest.fixture(params=[(name, n_threads) for name in SETS for n_threads in (1, 3)], ids=str)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    name, n_threads = request.param
    built = build_for(name, "exact", n_threads)
    yield built
    built.close()


def floats(*shape: int, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_rms_norm(kernels: Kernels, length: int) -> None:
    x, weight = floats(65, length), floats(length, seed=4)
    found = kernels.rms_norm(x, weight, 1e-5)
    assert np.allclose(found, reference.rms_norm(x, weight, 1e-5), rtol=3e-6, atol=1e-7)
    alone = [kernels.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(len(x))]
    assert np.concatenate(alone).tobytes() == found.tobytes()


def test_rms_norm_of_zeros_and_nan(kernels: Kernels) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 7] = np.nan
    found = kernels.rms_norm(x, np.ones(64, np.float32), 1e-5)
    assert (found[0] == 0).all() and np.isnan(found[1]).all()


@pytest.mark.parametrize(("head_width", "half"), [(128, 64), (64, 16), (96, 20), (32, 16)])
def test_rotate(kernels: Kernels, head_width: int, half: int) -> None:
    x = floats(65, 3, head_width)
    cosines, sines = floats(65, half, seed=4), floats(65, half, seed=5)
    found = kernels.rotate(x.copy(), cosines, sines)
    assert np.allclose(found, reference.rotate(x.copy(), cosines, sines), rtol=1e-6, atol=1e-6)
    assert (found[..., 2 * half :] == x[..., 2 * half :]).all()
    for i in range(len(x)):
        alone = kernels.rotate(x[i : i + 1].copy(), cosines[i : i + 1], sines[i : i + 1])
        assert alone.tobytes() == found[i : i + 1].tobytes()


@pytest.mark.parametrize(("n_experts", "n_active"), [(4, 2), (60, 4), (64, 8), (128, 8), (1025, 3)])
@pytest.mark.parametrize("norm_topk", [False, True])
def test_top_experts(kernels: Kernels, n_experts: int, n_active: int, norm_topk: bool) -> None:
    scores = 3 * floats(65, n_experts)
    chosen, weights = kernels.top_experts(scores.copy(), n_active, norm_topk)
    wanted, shares = reference.top_experts(scores.copy(), n_active, norm_topk)
    assert (chosen == wanted).all() and chosen.dtype == np.int32
    assert np.allclose(weights, shares, rtol=1e-5)
    for i in range(len(scores)):
        ids, alone = kernels.top_experts(scores[i : i + 1].copy(), n_active, norm_topk)
        assert (ids == chosen[i]).all() and alone.tobytes() == weights[i : i + 1].tobytes()


@pytest.mark.parametrize(
    ("scores", "n_active"),
    [
        ([1, 1, 1, 1], 2),  # the lower id wins a tie
        ([0, 1, 1, 1], 1),
        ([1, 2, 3, 4], 4),
        ([np.nan] * 4, 2),
        ([0, np.nan, 5, 1], 3),
        ([0, np.inf, np.inf, 1], 3),
        ([-np.inf, 3, -np.inf, -np.inf], 2),
        ([-1e30, 1e30, 0, 1], 3),
    ],
)
def test_top_experts_of_strange_scores(
    kernels: Kernels, scores: list[float], n_active: int
) -> None:
    row = np.array([scores], np.float32)
    chosen, weights = kernels.top_experts(row.copy(), n_active, False)
    wanted, shares = reference.top_experts(row.copy(), n_active, False)
    assert chosen.tolist() == wanted.tolist()
    assert np.allclose(weights, shares, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("width", LENGTHS)
@pytest.mark.parametrize("n_active", [1, 8])
def test_combine(kernels: Kernels, width: int, n_active: int) -> None:
    out, weights = floats(65 * n_active, width), floats(65, n_active, seed=4)
    found = kernels.combine(out.copy(), weights)
    # products are rounded before they are added, one expert after another, as in the reference
    assert found.tobytes() == reference.combine(out.copy(), weights).tobytes()
