"""Guesses that are read: where they go, who goes for them and when, and what compute tells."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_model
from model_runner import ModelRunner
from read_cases import pool_of
from simulation import Engine, engine, need
from test_feed import N_EXPERTS, PoolStage

from compute_worker.kernels import LayerRun
from coordinator.core.actions import ToCompute, ToWorker
from coordinator.core.prefetch import MAX_GUESSES, Phase, Prefetch
from coordinator.core.request import Phase as RequestPhase
from coordinator.core.state import Continue, FromCompute, NewRequest
from shm.messages import (
    Evicted,
    Grant,
    Guess,
    KnownLayer,
    Need,
    ReadSlabs,
    Sampling,
    Step,
    Submit,
)

N_LAYERS = 2


def acting(mode: str = "router") -> Prefetch:
    """One that has proved itself."""
    prefetch = Prefetch(mode)
    prefetch.phase = Phase.ON
    return prefetch


def full(prefetch: Prefetch) -> Engine:
    """Both layers have eight of their experts in the pool, which is full."""
    run = engine(N_LAYERS, 16, 16, prefetch=prefetch, lasting_grants=True, n_readers=1, credit=4)
    held: tuple[Any, ...] = ()
    prefetch.phase = Phase.ASLEEP
    for layer in range(N_LAYERS):
        _, held = run.run_layer(need(layer, list(range(8)), held))
    run.core.residency.end_layer(held)
    prefetch.phase = Phase.ON
    run.inbox.clear()
    return run


def read_keys(actions: list[Any]) -> list[tuple[int, int]]:
    told = [a.message for a in actions if isinstance(a, ToWorker)]
    return [(r.layer, r.expert) for m in told if isinstance(m, ReadSlabs) for r in m.reads]


def evicted_keys(actions: list[Any]) -> list[tuple[int, int]]:
    told = [a.message for a in actions if isinstance(a, ToCompute)]
    ends = [m.keys for m in told if isinstance(m, Evicted)]
    ends += [m.evicted for m in told if isinstance(m, Grant)]
    return [key for keys in ends for key in keys]


# The core


def test_a_full_pool_reads_no_guess_before_somebody_had_to_go() -> None:
    run = full(acting())
    assert run.handle(FromCompute(Guess(1, (9,)))) == []


def test_room_is_made_where_compute_waits_and_is_told_with_its_grant() -> None:
    run = full(acting())
    actions = run.handle(FromCompute(need(0, [0, 8])))
    told = [a.message for a in actions if isinstance(a, ToCompute)]
    assert [type(message) for message in told] == [Grant]
    assert len(evicted_keys(actions)) == 1 + 2, "one for the miss, two for guesses to come"
    assert {(0, 0), (0, 8)}.isdisjoint(evicted_keys(actions))
    run.complete_all_reads()
    actions = run.handle(FromCompute(Guess(1, (9, 10, 11))))
    assert read_keys(actions) == [(1, 9), (1, 10)], "as many as are free"
    assert evicted_keys(actions) == []


def test_room_is_made_between_two_steps() -> None:
    run = full(acting())
    actions = run.core.residency.end_layer(())
    assert len(evicted_keys(actions)) == 2
    assert read_keys(run.handle(FromCompute(Guess(0, (12,))))) == [(0, 12)]


def test_guesses_wait_for_demand_reads_and_for_each_other() -> None:
    run = full(acting())
    actions = run.handle(FromCompute(need(0, [8])._replace(predicted=(9,))))
    assert read_keys(actions) == [(0, 8)]
    assert read_keys(run.handle(FromCompute(Guess(1, (9,))))) == []
    run.complete_some_read()
    assert [(r.layer, r.expert) for r in run.under_way["io0"]] == [(1, 9)]
    assert read_keys(run.handle(FromCompute(Guess(1, (10,))))) == [(1, 10)]
    assert read_keys(run.handle(FromCompute(Guess(1, (11,))))) == [], "two at once are enough"


def test_what_is_guessed_stays_while_somebody_else_can_go() -> None:
    """LRU would evict layer 0's first; but these are guessed to be used next."""
    run = full(acting())
    oldest = tuple(range(4))
    run.handle(FromCompute(need(1, [8, 9])._replace(predicted=())))
    run.complete_all_reads()
    run.evicted.clear()
    run.handle(FromCompute(Guess(0, oldest)))
    actions = run.handle(FromCompute(need(1, [10, 11, 12])))
    assert {(0, expert) for expert in oldest if run.core.residency.slots.find((0, expert))}
    assert {(0, e) for e in oldest}.isdisjoint(evicted_keys(actions))


def test_guesses_that_fill_a_class_give_way_to_what_is_needed() -> None:
    prefetch = acting()
    run = engine(2, 8, 4, prefetch=prefetch, lasting_grants=True, n_readers=1)
    run.handle(FromCompute(Guess(1, (0, 1, 2, 3))))
    run.complete_all_reads()
    run.handle(FromCompute(Guess(1, (0, 1, 2, 3))))
    run.complete_all_reads()
    assert {key for key, _ in run.core.residency.slots.resident()} == {(1, e) for e in range(4)}
    computed, _ = run.run_layer(need(0, [4, 5]))
    assert computed == [4, 5]


def test_layers_that_sent_no_need_are_scored() -> None:
    run = full(acting())
    uses = need(0, [0, 1]).experts
    earlier = (KnownLayer(0, uses, (3, 4)),)
    run.handle(FromCompute(need(1, [3, 8])._replace(earlier=earlier)))
    counters = run.core.residency.prefetch.counters
    assert (counters.guessed, counters.right) == (2, 1)


SUBMIT = Submit(1, (1, 2), Sampling(0, 0, 1, 0, 1, 0), 64, False)


@pytest.mark.parametrize(
    ("mode", "phase", "has_trace", "n_guesses"),
    [
        ("router", Phase.ON, False, MAX_GUESSES),
        ("router", Phase.ASLEEP, False, 0),
        ("router", Phase.TRIAL, False, 0),  # its first block compares
        ("previous-token", Phase.ON, False, 0),
        ("prompt", Phase.OFF, False, 0),
        ("off", Phase.OFF, False, 0),
        ("off", Phase.OFF, True, 256),
    ],
)
def test_a_step_asks_for_guesses_that_somebody_hears(
    mode: str, phase: Phase, has_trace: bool, n_guesses: int
) -> None:
    run = engine(2, 8, 8, prefetch=Prefetch(mode))
    run.core.residency.prefetch.phase = phase
    run.core._on_need = (lambda need: None) if has_trace else None
    run.handle(NewRequest(SUBMIT, 4, frozenset()))
    run.handle(Continue())
    (step,) = [message for message in run.inbox if isinstance(message, Step)]
    assert step.n_guesses == n_guesses
    request = run.core.requests.of(1)
    assert request and request.phase is RequestPhase.PROMPT


def test_a_prompt_alone_may_be_read_ahead() -> None:
    prefetch = Prefetch("prompt")
    prefetch.handle_need(need(0, [1])._replace(predicted=(3,)), 1)
    assert (prefetch.wanted(), prefetch.is_acting) == ([], False)


# Compute

LAYER = 1


@pytest.fixture
def pool_stage(tmp_path: Path) -> Iterator[PoolStage]:
    """A layer that has one after it."""
    options = {"n_experts": N_EXPERTS, "n_active": 3, "n_layers": 3}
    model = tiny_model(tmp_path / "tiny.gguf", **options)
    runner = ModelRunner(model)
    with pool_of(N_EXPERTS, *runner.spec.slabs.layers[LAYER].range_bytes) as (pool, _):
        yield PoolStage(runner, pool, model.read_bytes())
    runner.close()


def guessing(stage: PoolStage) -> None:
    """The stage's layer is known from now on."""
    everything = stage.grant(stage.used)._replace(lasting=True)
    stage.link.answer = lambda need: [everything]
    stage.run()
    stage.feed.take_earlier()
    stage.link.sent.clear()


def run_after(stage: PoolStage, guessed: tuple[int, ...]) -> bytes:
    """The layer is fed after a run that ended at it, with these guesses for the next one."""
    unknown = (stage.x, stage.chosen, stage.shares)
    nothing = np.empty((0, *stage.chosen.shape), np.int32)
    stage.feed.used(LayerRun(range(LAYER, LAYER), nothing, 0, unknown, [guessed]))
    return stage.run()


@pytest.mark.parametrize("told", [(), (6, 5)])
def test_a_layer_without_a_need_tells_what_it_guesses(
    pool_stage: PoolStage, told: tuple[int, ...]
) -> None:
    guessing(pool_stage)
    assert run_after(pool_stage, told) == pool_stage.expected
    assert pool_stage.run() == pool_stage.expected  # without a guess
    pool_stage.feed.take_earlier()
    pool_stage.link.sent.clear()
    assert run_after(pool_stage, told) == pool_stage.expected
    assert pool_stage.link.sent == ([Guess(LAYER + 1, told)] if told else [])
    assert [known.predicted for known in pool_stage.feed.take_earlier()] == [told]


def test_a_guess_of_what_is_known_is_no_message(pool_stage: PoolStage) -> None:
    guessing(pool_stage)
    after = [pool_stage.location(e)._replace(expert=e) for e in (5, 6)]
    pool_stage.feed._lasting.keep(LAYER + 1, after)
    assert run_after(pool_stage, (6, 5)) == pool_stage.expected
    assert pool_stage.link.sent == []
    pool_stage.feed.note(Evicted(((LAYER + 1, 6),)))
    assert run_after(pool_stage, (6, 5)) == pool_stage.expected
    assert pool_stage.link.sent == [Guess(LAYER + 1, (6,))]


def test_a_need_carries_its_guess(pool_stage: PoolStage) -> None:
    guessing(pool_stage)
    pool_stage.feed.note(Evicted(((LAYER, pool_stage.used[0]),)))
    assert run_after(pool_stage, (6,)) == pool_stage.expected
    (asked,) = pool_stage.link.sent
    assert isinstance(asked, Need)
    assert asked.predicted == (6,)
