"""Same bits: no setting of processes, readers, pool, policy, chunk or company changes a bit.

The arms are a set in which every pair of values of two settings occurs together; `make identical`
runs every combination.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from arms import Computed, Together, kept_of, run_arm, run_together
from gguf_builder import tiny_model
from identical import (
    N_NEW_TOKENS,
    SETTINGS,
    all_arms,
    covering_arms,
    describe,
    flags_of,
    make_model,
    model_of,
    pairs_of,
)

from coordinator.processes.launch import ONE_THREAD

ARMS = covering_arms()
PROMPTS = {  # the longest first, so that it still generates when the last joins
    1: [8, 9] * 66,  # more than two chunks of 64
    2: list(range(100, 170)),  # more than one tile of 64 positions
    3: [5, 9, 301, 44] * 5,
    4: [7],
}
N_TOGETHER = 11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def computed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Computed]:
    """What an arm computes, by its number. Those with a single process share one start."""
    folder = tmp_path_factory.mktemp("kept")
    singles = [number for number, arm in enumerate(ARMS) if arm[0].startswith("single")]
    program = [sys.executable, "-P", str(Path(__file__).with_name("single_arms.py"))]
    done = subprocess.run(
        [*program, str(model), str(folder), *map(str, singles)],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens_of_singles = json.loads(done.stdout)
    tokens, _ = describe(model)

    @functools.cache
    def compute(number: int) -> Computed:
        out = folder / f"{number}.npz"
        if number in singles:
            return Computed(*kept_of(out, len(tokens)), tokens_of_singles[str(number)])
        own, flags = model_of(ARMS[number], model), flags_of(ARMS[number], model)
        return run_arm(own, tokens, flags, out, N_NEW_TOKENS)

    return compute


def test_the_arms_cover_all_pairs() -> None:
    """Of every two settings, every two values that make sense together."""
    assert len(ARMS) < 70
    assert pairs_of(ARMS) == pairs_of(all_arms())
    n_pool_readers = 4
    expected = {
        (p, r) for p in SETTINGS["processes"] for r in list(SETTINGS["reader"])[:n_pool_readers]
    }
    assert {(arm[0], arm[1]) for arm in ARMS} >= expected


@pytest.mark.parametrize("number", range(1, len(ARMS)), ids=lambda n: ", ".join(ARMS[n]))
def test_an_arm_changes_no_bit(computed: Callable[[int], Computed], number: int) -> None:
    expected, found = computed(0), computed(number)
    assert len(found.tokens) == N_NEW_TOKENS
    assert found.tokens == expected.tokens
    assert found.topk == expected.topk
    assert found.logits == expected.logits


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """More layers than a prompt may take at once while others wait for their next token; a smaller
    one for the kernels that take their time."""
    folder = tmp_path_factory.mktemp("deep")
    types = {"native": "Q4_K_M", "numpy": "Q8_0"}
    return {
        kernels: tiny_model(
            folder / f"{kernels}.gguf", n_layers=6, quantisation=quantisation, n_active=3
        )
        for kernels, quantisation in types.items()
    }


@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_company_changes_no_token(deep_models: dict[str, Path], kernels: str) -> None:
    """Each sequence alone, and beside three others in the same steps."""
    deep_model = deep_models[kernels]
    flags = ("--kernels", kernels, "--chunk", "64", "--pool", "50%")
    alone = run_together(deep_model, PROMPTS, N_TOGETHER, flags, max_running=1)
    together = run_together(deep_model, PROMPTS, N_TOGETHER, flags)
    assert {len(tokens) for tokens in alone.tokens.values()} == {N_TOGETHER}
    assert together.tokens == alone.tokens
    assert max(alone.step_sizes) == 1
    assert max(together.step_sizes) == len(PROMPTS)  # they did share steps
    n_chunks = sum(-(-len(prompt) // 64) for prompt in PROMPTS.values())
    assert steps_without_tokens(alone) == n_chunks - len(PROMPTS)
    # chunks were cut at layer boundaries
    assert steps_without_tokens(together) > steps_without_tokens(alone)


def steps_without_tokens(run: Together) -> int:
    """Parts of prompts that are not the last."""
    return run.n_steps - len(run.step_sizes)


def test_company_and_a_small_pool(deep_models: dict[str, Path]) -> None:
    """The union of four sequences goes in waves through two slots of each class."""
    deep_model = deep_models["native"]
    _, smallest = describe(deep_model)
    flags = ("--chunk", "64", "--pool", str(smallest), "--io-workers", "2")
    roomy = ("--chunk", "512", "--pool", "all")
    together = run_together(deep_model, PROMPTS, N_TOGETHER, flags)
    assert together.tokens == run_together(deep_model, PROMPTS, N_TOGETHER, roomy).tokens
