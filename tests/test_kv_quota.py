"""Contexts that are full to the last token, and sequences that share too few KV blocks."""

import dataclasses
import random
from pathlib import Path

import pytest
from arms import (
    Together,
    exact_config,
    run_json,
    run_program,
    run_together,
    spelled,
    submit_of,
)
from faults import session
from gguf_builder import tiny_model

from coordinator.core.state import NewRequest
from coordinator.plan.machine import read_machine
from coordinator.plan.setup import prepared
from coordinator.serving.start import started

VOCABULARY = 300
TOKENS = [random.Random(4).randrange(VOCABULARY) for _ in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("quota") / "model.gguf", context_length=256)


@pytest.mark.parametrize("n_context", [64, 65, 128, 200, 256])
def test_a_prompt_may_fill_the_context_but_for_one_token(model: Path, n_context: int) -> None:
    with session(model, "--context", str(n_context)) as run:
        for n_tokens in (1, 5):
            submit = submit_of(n_tokens, TOKENS[: n_context - n_tokens], n_context)
            run.engine.submit(NewRequest(submit, 9, frozenset()))
            assert len(run.finish(n_tokens)) == n_tokens
            assert run.listener.ended[n_tokens].reason == "length"


def test_the_command_knows_the_context(model: Path) -> None:
    flags = ("--model", str(model), "--context", "65", "--ignore-eos", "-n", "9")
    record = run_json(*flags, "--tokens", spelled(TOKENS[:64]))
    assert len(record["tokens"]) == 1
    assert record["stop_reason"] == "length"
    done = run_program(*flags, "--tokens", spelled(TOKENS[:65]))
    assert done.returncode == 2
    assert "--prompt: expected fewer than 65 tokens" in done.stderr


def test_more_context_than_the_model_has_is_refused(model: Path) -> None:
    done = run_program("--model", str(model), "--context", "257", "--tokens", "1")
    assert done.returncode == 2
    assert "--context: expected at most 256 tokens" in done.stderr


def test_sequences_that_do_not_fit_together_wait_for_each_other(model: Path) -> None:
    """Three, two, one and four blocks of a quota of four."""
    prompts = {1: TOKENS[:130], 2: TOKENS[50:140], 3: TOKENS[:20], 4: TOKENS[7:240]}
    alone = run_together(model, prompts, 6, max_running=1)
    listener = Together()
    with prepared(exact_config(model, ()), read_machine(), n_sequences=4) as setup:
        assert setup.plan.n_kv_blocks == 16
        plan = dataclasses.replace(setup.plan, n_kv_blocks=4)
        with started(dataclasses.replace(setup, plan=plan), listener) as engine:
            for request, prompt in prompts.items():
                submit = submit_of(request, prompt, n_context=256)
                engine.submit(NewRequest(submit, 6, frozenset()))
            while len(listener.ended) < len(prompts):
                engine.run_once()
                engine.core.check()
    assert listener.tokens == alone.tokens
    assert all(ended.reason == "length" for ended in listener.ended.values())
