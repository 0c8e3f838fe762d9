"""The C kernels' matrix products: against dequantised float64, and bit for bit against themselves.

Every instruction set this machine can run is tested; each is one provider of the same operations.
"""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from random_weights import random_matrix
from running_program import wait_until

from compute_worker import reference
from compute_worker.kernels import KernelError
from compute_worker.matrix import Addresses, ExpertShape, Floats, Integers, Matrix, dequantise
from compute_worker.native_kernels import (
    Engine,
    build,
    build_for,
    runnable_instruction_sets,
    unavailable_reason,
)
from compute_worker.native_types import NATIVE_TYPES
from io_worker.ggml_types import GGML_TYPES

SETS = runnable_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"native kernels: {unavailable_reason()}")

FLOATS = ("F32", "F16", "BF16")
BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
BLOCKS_OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
LOOKED_UP = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
TYPES = FLOATS + BLOCKS_OF_32 + BLOCKS_OF_256 + LOOKED_UP
NUMERICS = ("exact", "fast")
# A length that is no whole number of tiles where the type allows it, and one that is.
COLUMNS = dict.fromkeys(TYPES, 512) | dict.fromkeys(BLOCKS_OF_32, 416) | dict.fromkeys(FLOATS, 333)
N_ROWS = 37  # no whole number of vectors of any set
GROUP = 32  # columns that share an activation scale
MOST_TOKENS = 97  # one more than share an unpacked tile


def weights_of(type_name: str, n_cols: int, seed: int = 1, n_rows: int = N_ROWS) -> Matrix:
    data = random_matrix(type_name, n_rows, n_cols, 0.1, np.random.default_rng(seed))
    return Matrix(data.ravel(), int(GGMLQuantizationType[type_name]), n_rows, n_cols)


def tokens_of(n_tokens: int, n_cols: int, seed: int = 2) -> Floats:
    """Normal values, scaled differently from group to group as real activations are."""
    rng = np.random.default_rng(seed)
    scales = np.repeat(np.exp(rng.standard_normal(-(-n_cols // GROUP))), GROUP)[:n_cols]
    values: Floats = (rng.standard_normal((n_tokens, n_cols)) * scales).astype(np.float32)
    return values


def errors(
    engine: Engine, matrix: Matrix, x: Floats
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Errors of the product, what float32 sums may be wrong by, and what half a unit in the last
    place of 16-bit activations can do: all (T, n_rows)."""
    weights = dequantise(matrix.data, matrix.type, matrix.n_cols).astype(np.float64)
    wide = x.astype(np.float64)
    error = np.abs(engine.matmul(matrix, x) - wide @ weights.T)
    padding = -matrix.n_cols % GROUP
    grouped = np.pad(np.abs(wide), ((0, 0), (0, padding))).reshape(len(x), -1, GROUP)
    largest = np.repeat(grouped.max(axis=-1), GROUP, axis=-1)[:, : matrix.n_cols]
    reach = largest @ np.abs(weights).T  # every value as large as its group's largest
    return error, reach * 2.0**-23 * 8, reach / 32639 / 2


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=NUMERICS)
def numerics(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(instruction_set: str, numerics: str) -> Iterator[Engine]:
    opened = Engine(instruction_set, numerics, 2)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("n_tokens", [1, 6])
def test_several_matrices_at_once_are_each_alone(name: str, n_tokens: int) -> None:
    """More than go at once, floats beside integers, rows that are no whole vectors."""
    types = ("Q4_K", "F32", "Q6_K", "Q8_0", "F16", "Q2_K")
    matrices = [weights_of(kind, 512, n_rows=37 + 64 * i) for i, kind in enumerate(types)]
    x = tokens_of(n_tokens, 512)
    for numerics in NUMERICS:
        engine = Engine(name, numerics, 2)
        together = engine.matmuls(matrices, x)
        alone = [engine.matmul(matrix, x) for matrix in matrices]
        engine.close()
        assert [a.tobytes() for a in together] == [a.tobytes() for a in alone]


def test_the_types_that_others_count_on(engine: Engine) -> None:
    assert {type_id for type_id in GGML_TYPES if engine.has_type(type_id)} == NATIVE_TYPES


@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_as_near_as_their_numerics_allow(
    engine: Engine, numerics: str, type_name: str
) -> None:
    assert engine.has_type(int(GGMLQuantizationType[type_name]))
    for n_cols in {COLUMNS[type_name], 512}:
        matrix, x = weights_of(type_name, n_cols), tokens_of(5, n_cols)
        error, sums, steps = errors(engine, matrix, x)
        if numerics == "exact" or type_name in FLOATS:
            assert (error <= sums).all()
        else:
            assert (error <= steps + sums).all()
            # Roundings are independent: some root of the number of columns away from the worst.
            limit = np.mean(steps) * 2.5 / np.sqrt(n_cols) + np.mean(sums)
            assert np.sqrt(np.mean(error**2)) <= limit


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_no_bit_depends_on_tokens_or_threads(
    instruction_set: str, numerics: str, type_name: str, n_threads: int
) -> None:
    n_cols = COLUMNS[type_name]
    matrix, x = weights_of(type_name, n_cols, n_rows=101), tokens_of(MOST_TOKENS, n_cols)
    one = Engine(instruction_set, numerics, 1)
    several = Engine(instruction_set, numerics, n_threads)
    alone = np.concatenate([one.matmul(matrix, x[i : i + 1]) for i in range(MOST_TOKENS)])
    for n_tokens in (*range(1, 66), MOST_TOKENS - 1, MOST_TOKENS):
        assert (several.matmul(matrix, x[:n_tokens]) == alone[:n_tokens]).all(), n_tokens
    one.close()
    several.close()


@pytest.mark.parametrize("type_name", TYPES)
def test_no_bit_depends_on_rows_or_alignment(engine: Engine, type_name: str) -> None:
    n_cols = COLUMNS[type_name]
    matrix, x = weights_of(type_name, n_cols), tokens_of(3, n_cols)
    expected = engine.matmul(matrix, x)
    room = np.zeros(matrix.data.size + 128, np.uint8)
    for offset in (0, 1, 2, 6, 14, 30, 32):
        start = -room.ctypes.data % 64 + offset
        room[start : start + matrix.data.size] = matrix.data
        moved = Matrix(room[start : start + matrix.data.size], matrix.type, N_ROWS, n_cols)
        assert (engine.matmul(moved, x) == expected).all(), offset
    stride = matrix.data.size // N_ROWS
    for first, n_rows in ((0, 1), (1, 15), (3, 16), (5, 17), (9, 28)):
        part = matrix.data[first * stride : (first + n_rows) * stride]
        product = engine.matmul(Matrix(part, matrix.type, n_rows, n_cols), x)
        assert (product == expected[:, first : first + n_rows]).all(), (first, n_rows)


def before_a_guard_page(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy whose last byte is the last one that may be read."""
    page = mmap.PAGESIZE
    n_bytes = -(-data.size // page) * page
    room = np.frombuffer(mmap.mmap(-1, n_bytes + page), np.uint8)
    guard = ctypes.c_void_p(room.ctypes.data + n_bytes)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(page), 0) == 0
    copy = room[n_bytes - data.size : n_bytes]
    copy[:] = data
    return copy


@pytest.mark.parametrize("type_name", TYPES)
def test_nothing_behind_a_matrix_is_read(engine: Engine, type_name: str) -> None:
    for n_cols in {COLUMNS[type_name], 512}:
        for n_rows in (16, 19):
            matrix = weights_of(type_name, n_cols, n_rows=n_rows)
            guarded = Matrix(before_a_guard_page(matrix.data), matrix.type, n_rows, n_cols)
            for n_tokens in (1, 3):
                x = tokens_of(n_tokens, n_cols)
                assert (engine.matmul(guarded, x) == engine.matmul(matrix, x)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
def test_bad_activations_show(engine: Engine, type_name: str, bad: float) -> None:
    matrix, x = weights_of(type_name, 512), tokens_of(3, 512)
    expected = engine.matmul(matrix, x)
    x[1, 77] = bad
    product = engine.matmul(matrix, x)
    assert not np.isfinite(product[1]).any()
    assert (product[[0, 2]] == expected[[0, 2]]).all()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "Q6_K"])
def test_zero_and_tiny_activations(engine: Engine, type_name: str) -> None:
    matrix = weights_of(type_name, 512)
    assert (engine.matmul(matrix, np.zeros((2, 512), np.float32)) == 0).all()
    assert np.abs(engine.matmul(matrix, np.full((1, 512), 1e-38, np.float32))).max() < 1e-30


SHAPES = [
    ("Q4_K", "Q4_K", "Q6_K", 512, 256),
    ("Q4_0", "Q8_0", "Q4_1", 96, 160),
    ("F16", "F32", "BF16", 100, 52),
    ("Q2_K", "Q2_K", "Q3_K", 256, 768),
    ("F32", "Q4_K", "F16", 256, 40),
]


def experts_of(
    shape: tuple[str, str, str, int, int], n_experts: int
) -> tuple[ExpertShape, Addresses, list[Matrix]]:
    """Random experts, and the matrices that own their bytes."""
    gate, up, down, width, expert_width = shape
    matrices = [
        weights_of(type_name, n_cols, 10 * i + j, n_rows)
        for i in range(n_experts)
        for j, (type_name, n_cols, n_rows) in enumerate(
            [(gate, width, expert_width), (up, width, expert_width), (down, expert_width, width)]
        )
    ]
    addresses = np.array([m.address for m in matrices], np.uint64).reshape(n_experts, 3)
    types = [m.type for m in matrices[:3]]
    return ExpertShape(*types, width, expert_width), addresses, matrices


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_no_bit_of_an_expert_depends_on_tokens_or_threads(
    instruction_set: str, numerics: str, type_name: str, n_threads: int
) -> None:
    width = 256 if type_name in BLOCKS_OF_256 + LOOKED_UP else 96
    shape, addresses, matrices = experts_of((type_name,) * 3 + (width, 256), 1)
    assert matrices
    x = tokens_of(MOST_TOKENS, width)
    one = Engine(instruction_set, numerics, 1)
    several = Engine(instruction_set, numerics, n_threads)
    numbers = np.arange(MOST_TOKENS, dtype=np.int32)
    alone = np.empty((MOST_TOKENS, width), np.float32)
    for i in range(MOST_TOKENS):
        one.expert_blocks(shape, addresses, [numbers[i : i + 1]], 1, x, alone)
    for n_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 63, 64, 65, 96, 97):
        out = np.empty((MOST_TOKENS, width), np.float32)
        chosen = numbers[::-1][:n_tokens]
        several.expert_blocks(shape, addresses, [chosen], 1, x, out)
        assert (out[chosen] == alone[chosen]).all(), n_tokens
    one.close()
    several.close()


@pytest.mark.parametrize(("gate", "up", "down", "width", "expert_width"), SHAPES)
def test_expert_blocks(
    engine: Engine, numerics: str, gate: str, up: str, down: str, width: int, expert_width: int
) -> None:
    n_experts, n_active, n_tokens = 4, 2, 150
    shape, addresses, matrices = experts_of((gate, up, down, width, expert_width), n_experts)
    assert len(matrices) == 3 * n_experts
    x = tokens_of(n_tokens, width)
    rng = np.random.default_rng(5)
    numbers = rng.permutation(n_tokens * n_active).astype(np.int32)
    # One expert with most pairs, one with a single pair, one without any; one pair left out.
    pairs: list[Integers] = [
        np.sort(numbers[:270]),
        numbers[270:270],
        numbers[270:271],
        numbers[271:-1],
    ]
    untouched = np.float32(-7)
    expected = np.full((n_tokens * n_active, width), untouched)
    reference.expert_blocks(shape, addresses, pairs, n_active, x, expected)
    out = np.full_like(expected, untouched)
    engine.expert_blocks(shape, addresses, pairs, n_active, x, out)
    assert (out[numbers[-1]] == untouched).all()
    difference = np.sqrt(np.mean((out - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert difference <= (1e-6 if numerics == "exact" else 0.02)

    few = np.full_like(expected, untouched)  # one expert and at most three pairs at a time
    for i, rows in enumerate(pairs):
        for start in range(0, min(len(rows), 9), 3):
            part = [rows[start : start + 3]]
            engine.expert_blocks(shape, addresses[i : i + 1], part, n_active, x, few)
    written = (few != untouched).all(axis=1)
    assert written.sum() == 9 + 1 + 9 and (few[written] == out[written]).all()


def test_types_without_a_kernel_go_to_the_reference(engine: Engine) -> None:
    matrix, x = weights_of("TQ2_0", 512), tokens_of(2, 512)
    assert not engine.has_type(matrix.type)
    assert (engine.matmul(matrix, x) == reference.matmul(matrix, x)).all()


def n_threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_sleep_when_parked_and_end_when_closed() -> None:
    before = n_threads_now()
    kernels = build("fast", 3)
    matrix, x = weights_of("Q4_K", 512, n_rows=400), tokens_of(2, 512)
    expected = kernels.matmul(matrix, x)
    for _ in range(300):
        kernels.park()
        assert (kernels.matmul(matrix, x) == expected).all()
    assert n_threads_now() == before + 2
    kernels.close()
    wait_until(lambda: n_threads_now() == before)  # the system may show one that has just ended


def test_short_runs_lose_no_part() -> None:
    """More threads than cores: some are put aside between taking a part and doing it."""
    kernels = build("fast", 5)
    x = tokens_of(1, 256)
    matrices = [weights_of("Q4_K", 256, n_rows=n_rows) for n_rows in (64, 128, 700)]
    expected = [kernels.matmul(matrix, x) for matrix in matrices]
    for _ in range(2000):
        for matrix, product in zip(matrices, expected, strict=True):
            assert (kernels.matmul(matrix, x) == product).all()
    kernels.close()


def test_an_instruction_set_that_cannot_run_is_refused() -> None:
    with pytest.raises(KernelError, match="expected sse9 with 1 threads"):
        build_for("sse9", "exact", 1)


def test_the_best_set_is_chosen() -> None:
    kernels = build("exact", 1)
    assert kernels.name == SETS[0] and SETS[-1] == "portable"
    kernels.close()
