"""The forward pass: golden values, a plain float64 judge, and bits that no batching changes."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_model
from gguf_bytes import U32, entry
from golden_cases import CASES
from model_runner import ModelRunner
from plain_model import PlainModel

from compute_worker.dense_layer import route
from compute_worker.forward import embed, forward, logits, rotation_of
from compute_worker.kernel_choice import select
from compute_worker.matrix import Floats, Matrix, group_by_expert
from compute_worker.reference import combine, rotate
from compute_worker.weights import Router

GOLDEN = Path(__file__).parent / "golden"
TOKENS = np.random.default_rng(5).integers(0, 400, 140).tolist()


@pytest.mark.parametrize("name", list(CASES))
def test_golden(tmp_path: Path, name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    seed = list(CASES).index(name)
    path = tiny_model(tmp_path / "model.gguf", seed=seed, **CASES[name])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == str(golden["digest"]), "the builder gives other bytes: run make_golden.py"
    runner = ModelRunner(path)
    prompt = golden["prompt"].tolist()
    table = runner.new_table(len(prompt) + len(golden["greedy"]))
    found = runner.run(runner.batch((prompt, 0, table)))
    difference = np.abs(found[golden["kept"]] - golden["logits"]).max()
    assert difference <= 2e-6 * np.abs(golden["logits"]).max()
    assert (np.array([chosen for (chosen,) in runner.chosen]) == golden["chosen"]).all()
    last, greedy = found[-1], []
    for position in range(len(prompt), len(prompt) + len(golden["greedy"])):
        greedy.append(int(last.argmax()))
        last = runner.run(runner.batch((greedy[-1:], position, table)))[-1]
    assert greedy == golden["greedy"].tolist()
    runner.close()


@pytest.mark.parametrize(
    "options",
    [
        {"expert_types": (("Q5_1", "Q4_1", "IQ4_NL"), ("MXFP4", "F16", "BF16"))},
        {"arch": "qwen3moe", "rope_base_key": False, "expert_width_key": False, "split": 3},
        {"n_heads": 8, "n_kv_heads": 2, "width": 128, "expert_width": 32, "n_active": 8},
        {
            "arch": "qwen3moe",
            "n_layers": 1,
            "entries": {
                "qwen3moe.rope.dimension_count": entry("qwen3moe.rope.dimension_count", U32, 8)
            },
        },
    ],
)
def test_odd_models_against_the_plain_one(tmp_path: Path, options: dict[str, Any]) -> None:
    runner = ModelRunner(tiny_model(tmp_path / "model.gguf", **options))
    whole = tiny_model(tmp_path / "whole.gguf", **{**options, "split": 1})
    plain = PlainModel(whole)
    expected = np.array([plain.step(token)[0] for token in TOKENS[:20]])
    found = runner.run(runner.batch((TOKENS[:20], 0, runner.new_table(20))))
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    runner.close()


@pytest.fixture(scope="module", params=["olmoe", "qwen3moe"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    runner = ModelRunner(tiny_model(folder / "model.gguf", arch=request.param), n_blocks=64)
    yield runner
    runner.close()


@pytest.fixture
def whole(runner: ModelRunner) -> Floats:
    """Logits of `TOKENS` in one batch: what every other way must equal bit for bit."""
    table = runner.new_table(len(TOKENS))
    found = runner.run(runner.batch((TOKENS, 0, table)))
    free(runner, table)
    return found


def free(runner: ModelRunner, table: list[int]) -> None:
    for block in table:
        runner.kv.free(block)


def test_any_number_of_tokens_gives_the_same_bits(runner: ModelRunner, whole: Floats) -> None:
    for n_tokens in range(1, 66):
        table = runner.new_table(n_tokens)
        found = runner.run(runner.batch((TOKENS[:n_tokens], 0, table)))
        assert (found == whole[:n_tokens]).all(), n_tokens
        free(runner, table)


@pytest.mark.parametrize(
    "cuts", [list(range(1, 140)), [64], [63, 65, 128], [1, 66, 139], [7, 30, 31, 100, 101, 129]]
)
def test_any_chunks_give_the_same_bits(runner: ModelRunner, whole: Floats, cuts: list[int]) -> None:
    table = runner.new_table(len(TOKENS))
    for start, stop in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
        found = runner.run(runner.batch((TOKENS[start:stop], start, table)))
        assert (found == whole[start:stop]).all(), (start, stop)
    free(runner, table)


def test_company_does_not_change_the_bits(runner: ModelRunner, whole: Floats) -> None:
    """Decode beside a prompt chunk, in the middle of the batch, with shuffled blocks."""
    tables = [runner.new_table(140) for _ in range(3)]
    tables[1].reverse()
    runner.run(runner.batch((TOKENS[:99], 0, tables[1])))
    for step, position in enumerate(range(99, 110)):
        batch = runner.batch(
            (TOKENS[step * 8 : step * 8 + 8], step * 8, tables[0]),
            (TOKENS[position : position + 1], position, tables[1]),
            (TOKENS[100 - step :][:1], step, tables[2]),
        )
        found = runner.run(batch)
        assert (found[8] == whole[position]).all()
        assert (found[:8] == whole[step * 8 : step * 8 + 8]).all()
    for table in tables:
        free(runner, table)


def test_a_shared_prefix_gives_the_same_bits(runner: ModelRunner, whole: Floats) -> None:
    first = runner.new_table(64)
    runner.run(runner.batch((TOKENS[:64], 0, first)))
    runner.kv.share(first[0])
    second = [*first, *runner.new_table(76)]
    found = runner.run(runner.batch((TOKENS[64:], 64, second)))
    assert (found == whole[64:]).all()
    free(runner, first)
    free(runner, second)


def test_resuming_at_a_layer_boundary_gives_the_same_bits(
    runner: ModelRunner, whole: Floats
) -> None:
    """A prompt chunk stops between two layers, another sequence decodes, the chunk goes on."""
    table, other = runner.new_table(140), runner.new_table(140)
    runner.run(runner.batch((TOKENS[:50], 0, other)))
    batch = runner.batch((TOKENS, 0, table))
    hidden = runner.layers(batch, embed(runner.weights, batch), range(1))
    kept = hidden.copy()
    found = runner.run(runner.batch((TOKENS[50:51], 50, other)))
    assert (found == whole[50]).all()
    assert (hidden == kept).all()
    hidden = runner.layers(batch, hidden, range(1, 2))
    assert (logits(runner.weights, hidden, runner.kernels) == whole).all()
    assert (logits(runner.weights, hidden[-1:], runner.kernels) == whole[-1:]).all()
    free(runner, table)
    free(runner, other)


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 1e-3), ("q8_0", 2e-2)])
def test_smaller_kv_types_stay_close(tmp_path: Path, kind: str, tolerance: float) -> None:
    """A token may fall on the other side of a near tie of two experts; then its logits jump."""
    path = tiny_model(tmp_path / "model.gguf", arch="qwen3moe")
    exact, small = ModelRunner(path), ModelRunner(path, kv_kind=kind)
    expected, found = (
        runner.run(runner.batch((TOKENS[:70], 0, runner.new_table(70))))
        for runner in (exact, small)
    )
    same = np.array(exact.chosen)[:, 0] == np.array(small.chosen)[:, 0]  # (L, T, A)
    alike = same.all(axis=(0, 2))  # (T)
    assert alike.sum() >= 68
    difference = np.abs(found - expected)[alike].max()
    assert 0 < difference <= tolerance * np.abs(expected).max()
    exact.close()
    small.close()


def test_hostile_weights_give_nonsense_but_no_crash(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf", quantisation="Q8_0")
    data = bytearray(path.read_bytes())
    data[-20000:] = b"\xff" * 20000  # NaN scales in the head and in the last experts
    path.write_bytes(data)
    runner = ModelRunner(path)
    found = runner.run(runner.batch((TOKENS[:5], 0, runner.new_table(5))))
    assert found.shape == (5, runner.spec.vocabulary_size) and np.isnan(found).any()
    runner.close()


def router_of(scores: Any, n_active: int, *, norm_topk: bool) -> tuple[Floats, Router]:
    """Inputs and a router that give exactly these scores (T, E)."""
    x = np.asarray(scores, np.float32)
    n_experts = x.shape[1]
    identity = np.eye(n_experts, dtype=np.float32).view(np.uint8).ravel()
    return x, Router(Matrix(identity, 0, n_experts, n_experts), n_active, norm_topk)


@pytest.mark.parametrize(
    ("scores", "n_active", "expected"),
    [
        ([[0, 3, 1, 2]], 2, [[1, 3]]),
        ([[3, 0, 1, 2], [0, 1, 2, 3]], 3, [[0, 2, 3], [1, 2, 3]]),
        ([[1, 1, 1, 1]], 2, [[0, 1]]),  # the lower id wins a tie
        ([[0, 1, 1, 1]], 1, [[1]]),
        ([[1, 2, 3, 4]], 4, [[0, 1, 2, 3]]),
        ([[np.nan] * 4], 2, [[0, 1]]),
    ],
)
def test_route_chooses(scores: Any, n_active: int, expected: list[list[int]]) -> None:
    x, router = router_of(scores, n_active, norm_topk=False)
    chosen, weights = route(x, router, select("numpy", "exact", 1))
    assert chosen.tolist() == expected and chosen.dtype == np.int32
    assert weights.shape == chosen.shape and weights.dtype == np.float32


def test_route_normalises_where_the_architecture_does() -> None:
    kernels = select("numpy", "exact", 1)
    scores = np.log([[0.1, 0.4, 0.2, 0.3]])
    _, plain = route(*router_of(scores, 2, norm_topk=False), kernels)
    _, scaled = route(*router_of(scores, 2, norm_topk=True), kernels)
    assert np.allclose(plain, [[0.4, 0.3]])
    assert np.allclose(scaled, [[4 / 7, 3 / 7]])


def test_group_by_expert() -> None:
    chosen = np.array([[1, 5], [0, 5], [1, 2]], np.int32)
    groups = group_by_expert(chosen)
    assert list(groups) == [0, 1, 2, 5]
    assert {expert: pairs.tolist() for expert, pairs in groups.items()} == {
        0: [2], 1: [0, 4], 2: [5], 5: [1, 3],
    }  # fmt: skip
    assert all(pairs.dtype == np.int32 for pairs in groups.values())


def test_combine_adds_in_ascending_order() -> None:
    """1e8 swallows 1, so any other order of these three gives another sum."""
    out = np.array([[1e8], [1], [-1e8]], np.float32)
    assert combine(out.copy(), np.ones((1, 3), np.float32)).tolist() == [[0.0]]
    assert combine(out[[0, 2, 1]], np.ones((1, 3), np.float32)).tolist() == [[1.0]]


def test_rotate_by_hand(runner: ModelRunner) -> None:
    spec = runner.spec
    x = np.zeros((2, 1, spec.head_width), np.float32)
    x[:, 0, 1] = 1  # the first part of pair 1
    turned = rotate(x.copy(), *rotation_of(spec, np.array([0, 3], np.int32)))
    angle = 3 * spec.rope_base ** (-2 / spec.rope_width)
    assert (turned[0] == x[0]).all()
    assert np.isclose(turned[1, 0, 1], np.cos(angle))
    assert np.isclose(turned[1, 0, 1 + spec.rope_width // 2], np.sin(angle))
    assert np.count_nonzero(turned[1]) == 2


@pytest.mark.parametrize("wanted", [[139], [0, 70, 138], [63, 64]])
def test_rows_that_are_wanted_do_not_depend_on_the_others(
    runner: ModelRunner, whole: Floats, wanted: list[int]
) -> None:
    table = runner.new_table(len(TOKENS))
    batch = runner.batch((TOKENS, 0, table))
    rows = np.array(wanted)
    layers = range(runner.spec.n_layers)
    hidden = forward(
        runner.weights,
        batch,
        embed(runner.weights, batch),
        layers,
        runner.kv,
        runner.experts,
        None,
        runner.kernels,
        rows,
    )
    assert (logits(runner.weights, hidden[rows], runner.kernels) == whole[rows]).all()
    assert len(runner.chosen[layers[-1]][-1]) == len(rows)
    free(runner, table)
