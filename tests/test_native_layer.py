"""The halves of a layer in one call of C, and several layers, against their operations one by one:
no bit differs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_model
from model_runner import ModelRunner

from compute_worker import dense_layer
from compute_worker.forward import embed, places_of
from compute_worker.kernels import Kernels, LayerRun
from compute_worker.known_layers import known_layers
from compute_worker.matrix import Addresses, Floats
from compute_worker.native_kernels import build_for, runnable_instruction_sets, unavailable_reason

SETS = runnable_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"native kernels: {unavailable_reason()}")

TOKENS = np.random.default_rng(7).integers(0, 400, 140).tolist()
MODELS: dict[str, dict[str, Any]] = {
    "norm over all heads": {"arch": "olmoe", "quantisation": "Q4_K_M"},
    "norm of each head": {"arch": "qwen3moe", "quantisation": "Q8_0"},
    "grouped heads": {"n_heads": 8, "n_kv_heads": 2, "width": 256, "expert_width": 32},
    "no norms of heads": {"arch": "qwen3moe", "quantisation": "Q4_0"},
    "floats, all experts": {"quantisation": "F16", "n_experts": 5, "n_active": 5, "n_heads": 2},
    "heads wider than the model": {
        "arch": "qwen3moe", "n_heads": 4, "n_kv_heads": 4, "head_width": 32, "width": 64
    },
}  # fmt: skip


class Refused(Exception):
    """An operation was called that the one call should have done."""


def refuse(*arguments: object) -> Any:
    raise Refused


def pair(path: Path, name: str, numerics: str, n_threads: int, **options: Any) -> list[ModelRunner]:
    """The same model twice: with the halves as one call, which calls nothing else of Python, and
    operation by operation."""
    kernels = build_for(name, numerics, n_threads)
    single: dict[str, Any] = dict.fromkeys(
        ("rms_norm", "rotate", "matmuls", "attention", "store_kv"), refuse
    )
    one_call: Any = replace(kernels, **single, top_experts=refuse)
    operations = replace(kernels, attend=dense_layer.attend, choose=dense_layer.choose)
    return [ModelRunner(path, kernels=each, **options) for each in (one_call, operations)]


def batches(runner: ModelRunner) -> list[Any]:
    """A prompt, a step of three sequences of which one goes on, and a lone token."""
    long, short, other = (runner.new_table(n) for n in (140, 70, 10))
    return [
        runner.batch((TOKENS[:139], 0, long)),
        runner.batch((TOKENS[:66], 0, short), (TOKENS[139:], 139, long), (TOKENS[5:9], 0, other)),
        runner.batch((TOKENS[66:67], 66, short)),
    ]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("numerics", "n_threads"), [("exact", 1), ("fast", 2)])
@pytest.mark.parametrize("kv_kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("model", list(MODELS))
def test_one_call_gives_the_bits_of_its_operations(
    tmp_path: Path, name: str, numerics: str, n_threads: int, kv_kind: str, model: str
) -> None:
    path = tiny_model(tmp_path / "model.gguf", **MODELS[model])
    runners = pair(path, name, numerics, n_threads, kv_kind=kv_kind)
    if model == "no norms of heads":
        for runner in runners:
            layers = [replace(layer, q_norm=None, k_norm=None) for layer in runner.weights.layers]
            runner.weights = replace(runner.weights, layers=tuple(layers))
    for ours, theirs in zip(*map(batches, runners), strict=True):
        states = [embed(runners[0].weights, ours).astype(np.float32) for _ in runners]
        for layer in range(runners[0].spec.n_layers):
            answers = []
            for runner, batch, hidden in zip(runners, (ours, theirs), states, strict=True):
                places = places_of(runner.spec, batch)
                own = (runner.kernels, runner.weights, layer, hidden)
                runner.kernels.attend(*own, places, runner.kv)
                answers.append(runner.kernels.choose(*own))
            assert np.isfinite(states[0]).all() and states[0].any()
            assert (states[0] == states[1]).all(), layer
            for found, expected in zip(*answers, strict=True):
                assert found.shape == expected.shape and found.dtype == expected.dtype
                assert (found == expected).all(), layer
    kept = [runner.kv.data.view(np.uint8) for runner in runners]
    assert (kept[0] == kept[1]).all() and kept[0].any()
    del kept
    runners[0].kernels.close()
    for runner in runners:
        runner.close()


def through_all(
    runner: ModelRunner, batch: Any, kernels: Kernels, entries: Addresses, n_guesses: int = 0
) -> tuple[Floats, list[LayerRun]]:
    """The hidden state after all layers, of which those that stop a run are fed by the runner."""
    hidden = embed(runner.weights, batch).astype(np.float32)
    places, runs = places_of(runner.spec, batch), []
    layers = range(runner.spec.n_layers)
    while layers:
        given = (runner.weights, layers, hidden, places, runner.kv, entries, n_guesses)
        run = runner.kernels.known_layers(kernels, *given)
        runs.append(run)
        assert run.layers == layers[: len(run.layers)]
        assert run.chosen.shape == (len(run.layers), len(hidden), runner.spec.n_active)
        layers = layers[len(run.layers) :]
        assert (run.unknown is None) == (not layers)
        if run.unknown is not None:
            hidden += runner.experts(layers.start, *run.unknown)
            layers = layers[1:]
    return hidden, runs


def assert_equal_runs(found: list[LayerRun], expected: list[LayerRun]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.layers == theirs.layers
        assert list(ours.guesses) == list(theirs.guesses)
        pairs = [
            (ours.chosen, theirs.chosen),
            *zip(ours.unknown or (), theirs.unknown or (), strict=True),
        ]
        for one, other in pairs:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert (one == other).all()
        assert bool(ours.experts_ns) == bool(theirs.experts_ns) == bool(ours.layers)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("numerics", "n_threads"), [("exact", 1), ("fast", 2)])
@pytest.mark.parametrize("model", list(MODELS))
def test_several_layers_give_the_bits_of_single_ones(
    tmp_path: Path, name: str, numerics: str, n_threads: int, model: str
) -> None:
    path = tiny_model(tmp_path / "model.gguf", **MODELS[model])
    runners = pair(path, name, numerics, n_threads)
    refusing = replace(runners[0].kernels, attend=refuse, choose=refuse, combine=refuse)
    runners[1].kernels = replace(runners[1].kernels, known_layers=known_layers)
    for ours, theirs in zip(*map(batches, runners), strict=True):
        found = through_all(runners[0], ours, refusing, runners[0].known().entries)
        expected = through_all(runners[1], theirs, runners[1].kernels, runners[1].known().entries)
        assert np.isfinite(found[0]).all() and (found[0] == expected[0]).all()
        assert_equal_runs(found[1], expected[1])
        assert [run.layers for run in found[1]] == [range(runners[0].spec.n_layers)]
    kept = [runner.kv.data.view(np.uint8) for runner in runners]
    assert (kept[0] == kept[1]).all() and kept[0].any()
    del kept
    runners[0].kernels.close()
    for runner in runners:
        runner.close()


N_LAYERS = 4
# (layer, how many of the experts that it chooses are not known)
UNKNOWN: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "one of the first layer": [(0, 1)],
    "one in the middle": [(1, 1)],
    "one of the last layer": [(N_LAYERS - 1, 1)],
    "several of a layer": [(2, 2)],
    "of two layers on end": [(1, 1), (2, 2)],
    "of all layers": [(layer, 1) for layer in range(N_LAYERS)],
}


@pytest.mark.parametrize("how", ["no address", "another mark"])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("unknown", list(UNKNOWN))
def test_a_run_ends_where_an_expert_is_not_known(
    tmp_path: Path, unknown: str, n_tokens: int, how: str
) -> None:
    options = {"quantisation": "Q4_K_M", "n_layers": N_LAYERS, "n_active": 3}
    path = tiny_model(tmp_path / "model.gguf", **options)
    runners = pair(path, SETS[0], "fast", 2)
    runners[1].kernels = replace(runners[1].kernels, known_layers=known_layers)
    outcomes, marks = [], np.array([[7, 8], [7, 9]], np.uint64)
    for runner in runners:
        batch = runner.batch((TOKENS[:n_tokens], 0, runner.new_table(n_tokens)))
        known = runner.known()
        known.entries[..., 3] = marks.ctypes.data
        known.entries[..., 4:] = marks[0]
        whole, (run,) = through_all(runner, batch, runner.kernels, known.entries)
        for layer, n_experts in UNKNOWN[unknown]:
            experts = np.unique(run.chosen[layer])[-n_experts:].tolist()
            if how == "no address":
                known.forget(layer, experts)
            else:
                known.entries[layer, experts, 4:] = marks[1]
        hidden, runs = through_all(runner, batch, runner.kernels, known.entries)
        assert (hidden == whole).all()
        stopped = [run.layers.stop for run in runs if run.unknown is not None]
        assert stopped == [layer for layer, _ in UNKNOWN[unknown]]
        outcomes.append((hidden, runs))
    (found, our_runs), (expected, their_runs) = outcomes
    assert (found == expected).all() and np.isfinite(found).all()
    assert_equal_runs(our_runs, their_runs)
    runners[0].kernels.close()
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("n_guesses", [1, 2, 256])
@pytest.mark.parametrize("n_lacking", [0, 1, 2])
def test_a_run_ends_where_a_guess_is_not_known(
    tmp_path: Path, n_guesses: int, n_lacking: int
) -> None:
    options = {"quantisation": "Q4_K_M", "n_layers": N_LAYERS, "n_active": 3}
    path = tiny_model(tmp_path / "model.gguf", **options)
    runners = pair(path, SETS[0], "fast", 2)
    runners[1].kernels = replace(runners[1].kernels, known_layers=known_layers)
    outcomes = []
    for runner in runners:
        batch = runner.batch((TOKENS[:1], 0, runner.new_table(1)))
        known = runner.known()
        whole, (run,) = through_all(runner, batch, runner.kernels, known.entries, n_guesses)
        assert [len(guess) for guess in run.guesses] == [min(3, n_guesses)] * (N_LAYERS - 1) + [0]
        used = set(run.chosen[2].ravel().tolist())
        known.forget(2, run.guesses[1][:n_lacking])
        hidden, runs = through_all(runner, batch, runner.kernels, known.entries, n_guesses)
        assert (hidden == whole).all()
        stopped = [run.layers.stop for run in runs if run.unknown is not None]
        needs = bool(used.intersection(run.guesses[1][:n_lacking]))
        assert stopped == [1] * bool(n_lacking) + [2] * needs
        outcomes.append((hidden, runs))
    (found, our_runs), (expected, their_runs) = outcomes
    assert (found == expected).all()
    assert_equal_runs(our_runs, their_runs)
    runners[0].kernels.close()
    for runner in runners:
        runner.close()


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "qwen3moe", "quantisation": "F16", "n_heads": 2, "head_width": 24},
        {"n_experts": 1040, "n_active": 2, "n_layers": 1, "width": 64, "expert_width": 32},
    ],
)
def test_what_c_cannot_do_goes_operation_by_operation(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = tiny_model(tmp_path / "model.gguf", **options)
    one_call, operations = pair(path, SETS[0], "exact", 1)
    with pytest.raises(Refused):
        one_call.run(batches(one_call)[0])
    whole = ModelRunner(path, kernels=build_for(SETS[0], "exact", 1))
    found, expected = (runner.run(batches(runner)[0]) for runner in (whole, operations))
    assert (found == expected).all()
    whole.kernels.close()
    operations.kernels.close()
    for runner in (one_call, operations, whole):
        runner.close()
