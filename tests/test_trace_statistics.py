"""What a trace says, on traces small enough to count by hand."""

import pytest

from coordinator.routing.trace_file import Trace, TraceHeader
from coordinator.routing.trace_statistics import (
    Guessed,
    locality,
    locality_by_chance,
    n_for_share,
    predictors,
    runs_of_tokens,
    skew,
    transfer,
    use_counts,
    working_set,
)
from shm.messages import ExpertUse, Need

HEADER = TraceHeader("f00d", 10, 2, (0, 1), ((10, 10, 10),), (0, 0))


def decode(step: int, layer: int, *experts: int, guess: tuple[int, ...] = ()) -> Need:
    return Need(step, layer, tuple(ExpertUse(expert, 1, 0) for expert in experts), guess, ())


def prompt(step: int, layer: int, tokens_of: dict[int, int]) -> Need:
    uses = tuple(ExpertUse(expert, n, min(n, 64)) for expert, n in tokens_of.items())
    return Need(step, layer, uses, (), ())


NEEDS = (
    prompt(1, 0, {0: 6, 1: 2}),
    prompt(1, 1, {5: 4, 6: 4}),
    decode(2, 0, 0, 1, guess=(5, 7)),
    decode(2, 1, 5, 6),
    decode(3, 0, 0, 2, guess=(5, 8)),
    decode(3, 1, 5, 8),
    prompt(4, 0, {9: 1}),
    prompt(4, 1, {9: 1}),
    decode(5, 0, 9, 8),
    decode(5, 1, 3, 4),
)
TRACE = Trace(HEADER, NEEDS)
RUNS = list(runs_of_tokens(NEEDS))


def test_prompts_cut_the_answers_into_runs() -> None:
    assert [len(run) for run in RUNS] == [2, 1]
    assert RUNS[0][0] == {0: {0, 1}, 1: {5, 6}}


def test_a_prompt_counts_its_tokens() -> None:
    counts = use_counts(NEEDS)
    assert (counts[0, 0], counts[0, 1], counts[1, 5]) == (8, 3, 6)


@pytest.mark.parametrize(
    ("uses", "share", "n"),
    [([], 0.8, 0), ([1], 0.8, 1), ([1, 4, 1], 0.5, 1), ([1, 4, 1, 2], 0.7, 2), ([1] * 10, 0.8, 8)],
)
def test_how_many_make_up_a_share(uses: list[float], share: float, n: int) -> None:
    assert n_for_share(uses, share) == n


def test_skew_of_each_layer() -> None:
    first, second = skew(TRACE)
    assert (first.layer, first.n_used) == (0, 5)
    assert first.n_for_share == (1, 3, 5)
    assert first.top_share == pytest.approx(8 / 15)
    assert second.n_used == 6


def test_neighbours_do_not_reach_over_a_prompt() -> None:
    assert locality(RUNS) == {1: pytest.approx(0.5)}
    chance = locality_by_chance(RUNS)
    assert 0 < chance < 0.5


def test_chance_is_that_of_independent_tokens() -> None:
    """Always the same expert: alike by chance too. Four in turn: a quarter."""
    same = [[{0: frozenset({1})}] * 8]
    assert locality_by_chance(same) == pytest.approx(1.0)
    in_turn = [[{0: frozenset({n % 4})} for n in range(8)]]
    assert locality_by_chance(in_turn) == pytest.approx(0.25)
    assert locality(in_turn) == {1: 0.0, 2: 0.0, 4: 1.0}


def test_what_is_touched_in_a_while() -> None:
    found = working_set(RUNS, {0: 100, 1: 1})
    assert found[1] == (4.0, pytest.approx(2 * 100 + 2 * 1))
    assert found[2] == (6.0, pytest.approx(3 * 100 + 3 * 1))
    assert 4 not in found


def test_guesses() -> None:
    previous, most_used, router = predictors(TRACE, RUNS)
    assert previous == Guessed("previous-token", 4, 2)
    assert router == Guessed("router", 4, 3)
    assert most_used.guessed == 8
    assert router.accuracy == 0.75


def test_without_recorded_guesses_the_router_is_left_out() -> None:
    bare = tuple(Need(n.step, n.layer, n.experts, (), ()) for n in NEEDS)
    names = [found.predictor for found in predictors(Trace(HEADER, bare), RUNS)]
    assert names == ["previous-token", "most used so far"]


def test_a_hot_set_of_itself_covers_what_its_own_does() -> None:
    other = Trace(HEADER, (decode(1, 0, 3, 4), decode(1, 1, 1, 2)))
    for row in transfer(TRACE, TRACE):
        assert row.other_covers == row.own_covers
        assert row.common == 1.0
    ten_percent = transfer(TRACE, other)[0]  # two experts of twenty
    assert ten_percent.other_covers == 0.0
    assert ten_percent.own_covers == pytest.approx((8 + 6) / 30)
    assert ten_percent.common == 0.0
