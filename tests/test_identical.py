"""Same bits: no setting of processes, readers, pool, policy, chunk or company changes a bit.

The arms are a set in which every pair of values of two settings occurs together; `make identical`
runs every combination.
"""

from pathlib import Path

import pytest
from arms import Together, run_arm, run_together
from gguf_builder import tiny_model
from identical import N_NEW_TOKENS, Arm, covering_arms, describe, flags_of, make_model

ARMS = covering_arms()
PROMPTS = {
    1: [5, 9, 301, 44] * 5,
    2: list(range(100, 170)),  # more than one tile of 64 positions
    3: [7],
    4: [8, 9] * 66,  # more than two chunks of 64
}
N_TOGETHER = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, bytes, list[int]]:
    """What the first arm computes."""
    return compute(model, ARMS[0], tmp_path_factory.mktemp("expected"))


def compute(model: Path, arm: Arm, folder: Path) -> tuple[bytes, bytes, list[int]]:
    tokens, smallest = describe(model)
    return run_arm(model, tokens, flags_of(arm, smallest), folder / "kept.npz", N_NEW_TOKENS)


def test_the_arms_cover_all_pairs() -> None:
    """Of every two settings, every two values."""
    assert len(ARMS) < 45
    values = [sorted({arm[i] for arm in ARMS}) for i in range(len(ARMS[0]))]
    for i, first in enumerate(values):
        for j in range(i + 1, len(values)):
            pairs = {(arm[i], arm[j]) for arm in ARMS}
            assert pairs == {(a, b) for a in first for b in values[j]}


@pytest.mark.parametrize("arm", ARMS[1:], ids=", ".join)
def test_an_arm_changes_no_bit(
    model: Path, expected: tuple[bytes, bytes, list[int]], arm: Arm, tmp_path: Path
) -> None:
    logits, topk, tokens = compute(model, arm, tmp_path)
    assert len(tokens) == N_NEW_TOKENS
    assert tokens == expected[2]
    assert topk == expected[1]
    assert logits == expected[0]


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than a prompt may take at once while others wait for their next token."""
    folder = tmp_path_factory.mktemp("deep")
    return tiny_model(folder / "deep.gguf", n_layers=6, quantisation="Q4_K_M", n_active=3)


def alone(model: Path, request: int, flags: tuple[str, ...]) -> Together:
    return run_together(model, {request: PROMPTS[request]}, N_TOGETHER, flags)


@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_company_changes_no_token(deep_model: Path, kernels: str) -> None:
    """One sequence, and the same beside three others in the same steps."""
    flags = ("--kernels", kernels, "--chunk", "64", "--pool", "50%")
    together = run_together(deep_model, PROMPTS, N_TOGETHER, flags)
    assert max(together.step_sizes) >= 3  # they did share steps
    n_steps = 0
    for request in PROMPTS:
        single = alone(deep_model, request, flags)
        assert together.tokens[request] == single.tokens[request], request
        assert len(single.tokens[request]) == N_TOGETHER
        n_steps += single.n_steps
    n_whole_prompts = sum(-(-len(prompt) // 64) for prompt in PROMPTS.values())
    assert n_steps == n_whole_prompts + len(PROMPTS) * (N_TOGETHER - 1)
    # prompts were cut at layer boundaries: more steps without a token than there are chunks
    n_decode_steps = len(together.step_sizes) - len(PROMPTS)
    assert together.n_steps - n_decode_steps > n_whole_prompts


def test_company_and_a_small_pool(deep_model: Path) -> None:
    """The union of four sequences goes in waves through two slots of each class."""
    _, smallest = describe(deep_model)
    flags = ("--chunk", "64", "--pool", str(smallest), "--io-workers", "2")
    roomy = ("--chunk", "512", "--pool", "all")
    together = run_together(deep_model, PROMPTS, N_TOGETHER, flags)
    assert together.tokens == run_together(deep_model, PROMPTS, N_TOGETHER, roomy).tokens
