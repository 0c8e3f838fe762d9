"""Prefetch: guesses, their score, and the comparison that decides whether they are acted on."""

import dataclasses
import random

import pytest
from simulation import Engine, engine, geometry, need, policy_geometry

from coordinator.core.policies import Lru, PolicyGeometry
from coordinator.core.policy_choice import POLICIES, make_policy
from coordinator.core.prefetch import (
    BLOCK_STEPS,
    BUSY_SHARE,
    BUSY_STEPS,
    IDLE_SHARE,
    MIN_TOKENS_PER_EXPERT,
    N_CLEAR_PAIRS,
    N_PAIRS,
    SLEEP_STEPS,
    UNTRIED_STEPS,
    Phase,
    Prefetch,
)
from coordinator.core.requests import Requests
from coordinator.core.residency import Residency
from coordinator.core.schedule import Schedule
from coordinator.core.state import Core
from shm.messages import ExpertUse, Need, SlotLease

TRIAL_STEPS = 2 * N_PAIRS * BLOCK_STEPS


def acting(mode: str = "router") -> Prefetch:
    """One that has seen an idle disk."""
    prefetch = Prefetch(mode)
    for _ in range(BUSY_STEPS):
        assert not prefetch.is_acting
        prefetch.handle_step(100, 0)
    assert prefetch.is_acting
    return prefetch


def on_trial(mode: str = "router") -> Prefetch:
    """One that has to prove itself now."""
    prefetch = acting(mode)
    for _ in range(UNTRIED_STEPS - BUSY_STEPS):
        assert prefetch.is_acting
        prefetch.handle_step(100, 0)
    assert prefetch.phase is Phase.TRIAL
    return prefetch


def run_trial(prefetch: Prefetch, on_ns: int, off_ns: int, drift: float = 1.0) -> None:
    """Steps of one trial; each step costs what its mode costs, times a drift."""
    for step in range(TRIAL_STEPS):
        if prefetch.phase is not Phase.TRIAL:
            return  # it was clear before
        cost = on_ns if prefetch.is_acting else off_ns
        prefetch.handle_step(int(cost * drift**step), 0)


@pytest.mark.parametrize(
    ("on_ns", "off_ns", "drift", "verdict"),
    [
        (80, 100, 1.0, Phase.ON),
        (100, 100, 1.0, Phase.ASLEEP),
        (120, 100, 1.0, Phase.ASLEEP),
        (1_000_000, 1_000_000, 0.999, Phase.ASLEEP),  # the machine gets faster, not prefetch
        (900_000, 1_000_000, 1.002, Phase.ON),
    ],
)
def test_the_clock_decides(on_ns: int, off_ns: int, drift: float, verdict: Phase) -> None:
    prefetch = on_trial()
    run_trial(prefetch, on_ns, off_ns, drift)
    assert prefetch.phase is verdict


def test_a_clear_gain_is_seen_within_a_short_answer() -> None:
    prefetch = on_trial()
    n_steps = 0
    while prefetch.phase is Phase.TRIAL:
        prefetch.handle_step(80 if prefetch.is_acting else 100, 0)
        n_steps += 1
    assert prefetch.phase is Phase.ON
    assert n_steps == 2 * N_CLEAR_PAIRS * BLOCK_STEPS


def test_it_wakes_after_a_sleep_and_is_judged_again() -> None:
    prefetch = on_trial()
    run_trial(prefetch, 120, 100)
    for _ in range(SLEEP_STEPS):
        assert not prefetch.is_acting
        prefetch.handle_step(100, 0)
    assert prefetch.phase is Phase.TRIAL
    run_trial(prefetch, 50, 100)
    assert prefetch.phase is Phase.ON


def wait_share(prefetch: Prefetch, share: float, n_steps: int = BUSY_STEPS) -> None:
    """Steps of which compute waits such a share for the disk."""
    for _ in range(n_steps):
        prefetch.handle_step(1000, int(1000 * share))


def test_where_the_disk_is_busy_it_waits_until_it_is_not() -> None:
    prefetch = acting()
    wait_share(prefetch, BUSY_SHARE + 0.1, BUSY_STEPS - 1)
    assert prefetch.is_acting, "too few steps to tell"
    wait_share(prefetch, BUSY_SHARE + 0.1, 1)
    assert prefetch.phase is Phase.BUSY
    assert (prefetch.is_acting, prefetch.n_wanted) == (False, 0)
    wait_share(prefetch, IDLE_SHARE + 0.01)
    assert prefetch.phase is Phase.BUSY, "less busy, not idle"
    wait_share(prefetch, 0.0)
    assert prefetch.phase is Phase.ON
    wait_share(prefetch, BUSY_SHARE - 0.01)
    assert prefetch.phase is Phase.ON


@pytest.mark.parametrize("shares", [(0.9, 0.9), (0.6, 0.3), (0.3, 0.6)])
def test_however_busy_the_disk_is_the_clock_decides_in_time(shares: tuple[float, float]) -> None:
    """Also where reading guesses makes compute wait so much more that they end each other."""
    prefetch = Prefetch("router")
    changes = 0
    for _ in range(UNTRIED_STEPS):
        assert prefetch.phase in (Phase.ON, Phase.BUSY)
        before = prefetch.phase
        wait_share(prefetch, shares[not prefetch.is_acting], 1)
        changes += prefetch.phase is not before
    assert prefetch.phase is Phase.TRIAL
    assert changes <= UNTRIED_STEPS // BUSY_STEPS + 1
    for _ in range(TRIAL_STEPS):
        prefetch.handle_step(80 if prefetch.is_acting else 100, 70)
    assert prefetch.phase is Phase.ON, "the clock has said so, however long compute waits"


def test_off_keeps_score_and_never_acts() -> None:
    prefetch = Prefetch("off")
    for layer, experts in ((0, (1, 2)), (1, (3, 4)), (0, (1, 5)), (1, (3, 4))):
        uses = tuple(ExpertUse(expert, 1, 0) for expert in experts)
        prefetch.handle_need(Need(1, layer, uses, (), ()), 1 if layer == 0 else None)
        assert prefetch.wanted() == []
    assert (prefetch.counters.guessed, prefetch.counters.right) == (2, 2)


def test_a_routers_guess_comes_before_the_last_token() -> None:
    prefetch = acting()
    prefetch.handle_need(need(1, [3, 4]), None)
    prefetch.handle_need(need(0, [1, 2]), 1)
    assert prefetch.wanted() == [], "the last token's is another mode"
    uses = (ExpertUse(1, 1, 0), ExpertUse(2, 1, 0))
    prefetch.handle_need(Need(1, 0, uses, (7, 6, 5), ()), 1)
    assert prefetch.wanted() == [(1, 7), (1, 6)]


def test_guesses_are_read_while_the_disk_idles_and_become_hits() -> None:
    prefetch = acting()
    run = engine(2, 8, 8, prefetch=prefetch)
    uses = (ExpertUse(1, 1, 0), ExpertUse(2, 1, 0))
    _, held = run.run_layer(Need(1, 0, uses, (5, 6), ()))
    run.complete_all_reads()
    assert prefetch.counters.issued == 2
    run.run_layer(Need(1, 1, (ExpertUse(5, 1, 0), ExpertUse(7, 1, 0)), (), held))
    assert prefetch.counters.used == 1
    assert run.core.residency.counters.hits == 1


def test_a_guess_on_its_way_is_promoted_to_a_demand() -> None:
    prefetch = acting()
    run = engine(2, 8, 8, prefetch=prefetch)
    _, held = run.run_layer(Need(1, 0, (ExpertUse(1, 1, 0),), (5,), ()))
    assert any(run.under_way.values())
    computed, _ = run.run_layer(Need(1, 1, (ExpertUse(5, 1, 0),), (), held))
    assert computed == [5]
    assert run.core.residency.counters.reads == 2


def test_guesses_that_fill_a_class_do_not_stop_a_demand() -> None:
    """Layer 1 has two slots of its own, and wrong guesses are being read into both."""
    prefetch = acting()
    shape = dataclasses.replace(
        geometry(2, 8, 6), class_of_slots=[0] * 4 + [1] * 2, class_of_layer={0: 0, 1: 1}
    )
    policy = Lru(PolicyGeometry(shape.class_of_layer, (4, 2)))
    residency = Residency(shape, policy, standing_grants=False, prefetch=prefetch)
    run = Engine(Core(residency, Requests(Schedule(2, 64))), random.Random(0), credit=4)
    run.start_readers(1)
    _, held = run.run_layer(Need(1, 0, (ExpertUse(1, 1, 0), ExpertUse(2, 1, 0)), (5, 6), ()))
    assert [(read.layer, read.expert) for read in run.under_way["io0"]] == [(1, 5), (1, 6)]
    uses = tuple(ExpertUse(expert, 1, 0) for expert in (3, 4, 5, 7))
    computed, _ = run.run_layer(Need(1, 1, uses, (), held))
    assert sorted(computed) == [3, 4, 5, 7]


def long_prompt(layer: int, experts: range, held: tuple[SlotLease, ...] = ()) -> Need:
    """A chunk whose tokens use nearly all experts."""
    uses = tuple(ExpertUse(expert, MIN_TOKENS_PER_EXPERT, 1) for expert in experts)
    return Need(1, layer, uses, (), held)


@pytest.mark.parametrize(("mode", "n_ahead"), [("router", 4), ("off", 0)])
def test_a_long_prompt_reads_the_next_layer_ahead_within_its_share(mode: str, n_ahead: int) -> None:
    """12 slots for three layers: layer 1 gets its 4 from layer 2, and no more."""
    run = engine(3, 8, 12, prefetch=Prefetch(mode))
    _, held = run.run_layer(need(2, [0, 1, 2, 3]))
    _, held = run.run_layer(long_prompt(0, range(8), held))
    run.complete_all_reads()
    residency = run.core.residency
    assert residency.slots.n_of_layer(1) == n_ahead
    computed, _ = run.run_layer(long_prompt(1, range(8), held))
    assert sorted(computed) == list(range(8))
    assert residency.counters.hits == n_ahead
    assert residency.counters.reads == 4 + 8 + 8, "none twice"


def test_a_short_prompt_reads_nothing_ahead() -> None:
    prefetch = acting()
    prefetch.handle_need(need(0, [1, 2]), 1)
    assert prefetch.ahead() == ()
    uses = (ExpertUse(1, MIN_TOKENS_PER_EXPERT - 1, 1), ExpertUse(2, MIN_TOKENS_PER_EXPERT, 1))
    prefetch.handle_need(Need(1, 0, uses, (), ()), 1)
    assert prefetch.ahead() == ()
    prefetch.handle_need(long_prompt(0, range(2)), 1)
    assert prefetch.ahead() == ((1, 0), (1, 1))
    prefetch.handle_need(long_prompt(1, range(2)), None)
    assert prefetch.ahead() == (), "the last layer"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("n_slots", [2, 5, 12])
def test_random_prompts_read_ahead_and_break_nothing(policy: str, n_slots: int) -> None:
    counts = {(layer, 0): 1.0 for layer in range(3)}
    made = make_policy(policy, policy_geometry(3, n_slots), counts, 2)
    run = engine(3, 8, n_slots, policy=made, seed=n_slots, prefetch=acting("previous-token"))
    rng = random.Random(n_slots)
    held: tuple[SlotLease, ...] = ()
    for number in range(60):
        uses = tuple(
            ExpertUse(expert, rng.choice([1, 20]), 1)
            for expert in sorted(rng.sample(range(8), rng.randint(4, 8)))
        )
        computed, held = run.run_layer(Need(1, number % 3, uses, (), held), kill_probability=0.1)
        assert sorted(computed) == sorted(use.expert for use in uses)
    if n_slots > 5:
        assert run.core.residency.prefetch.counters.used > 0


@pytest.mark.parametrize("seed", range(5))
def test_random_guesses_break_nothing(seed: int) -> None:
    prefetch = acting()
    n_slots = 5
    run = engine(
        3, 8, n_slots, policy=Lru(policy_geometry(3, n_slots)), seed=seed, prefetch=prefetch
    )
    rng = random.Random(seed)
    held: tuple[SlotLease, ...] = ()
    for number in range(200):
        uses = tuple(ExpertUse(e, 1, 0) for e in sorted(rng.sample(range(8), rng.randint(1, 6))))
        guess = tuple(rng.sample(range(8), 4))
        _, held = run.run_layer(Need(1, number % 3, uses, guess, held), kill_probability=0.1)
    assert prefetch.counters.issued >= prefetch.counters.used + prefetch.counters.wasted
