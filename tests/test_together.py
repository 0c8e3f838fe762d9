"""Sequences that share steps, and one that leaves: the tokens of the others stay what they are."""

import random
from pathlib import Path

import pytest
from arms import Together, exact_config, run_together, submit_of
from gguf_builder import tiny_model

from coordinator.core.state import EndRequest, NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.serving.start import started

N_NEW = 8
PROMPTS = {
    request: [random.Random(request).randrange(300) for _ in range(n_tokens)]
    for request, n_tokens in ((1, 70), (2, 5), (3, 130), (4, 33))
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("together") / "model.gguf", n_layers=10)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[int, list[int]]:
    return run_together(model, PROMPTS, N_NEW, max_running=1).tokens


def test_prompts_in_one_chunk(model: Path, alone: dict[int, list[int]]) -> None:
    together = run_together(model, PROMPTS, N_NEW)
    assert together.tokens == alone
    assert together.n_steps < 4 * 3 + N_NEW + 2  # all prompts in one chunk, cut in three


@pytest.mark.parametrize("n_steps", range(6))
def test_one_leaves_while_they_share(
    model: Path, alone: dict[int, list[int]], n_steps: int
) -> None:
    """In the middle of a step: of a part of the chunk, or of the answers."""
    listener = Together()
    with (
        prepared(exact_config(model, ()), read_machine(), n_sequences=4) as setup,
        started(setup, listener) as engine,
    ):
        for request, prompt in PROMPTS.items():
            engine.submit(NewRequest(submit_of(request, prompt), N_NEW, frozenset()))
        while listener.n_steps < n_steps or engine.core.requests.running_step is None:
            engine.run_once()
        engine.end(EndRequest(3, "cancelled"))
        while len(listener.ended) < len(PROMPTS):
            engine.run_once()
            engine.core.check()
    left = {request: tokens for request, tokens in alone.items() if request != 3}
    assert {request: listener.tokens[request] for request in left} == left
