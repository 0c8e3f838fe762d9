"""The rules of sampling as tables, and what holds for any logits."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from compute_worker.sampling import (
    LOWEST_LOGPROB,
    SequenceSampler,
    candidates,
    draw,
    finite,
    log_probability,
    penalised,
)
from shm.messages import Sampling

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=1)
GREEDY = replace(PLAIN, temperature=0.0)
SHARES = [0.05, 0.4, 0.1, 0.25, 0.2]  # by id; likeliest first: 1, 3, 4, 2, 0


def scores_of(shares: list[float]) -> np.ndarray:
    return np.log(np.array(shares, np.float64))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 0.9999}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 0.2}, [1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 7.0}, [1]),
        # 1 and 3 are all that top-k leaves, and 1 has 0.4 / 0.65 of it
        ({"top_k": 2, "top_p": 0.6}, [1]),
        ({"top_k": 2, "top_p": 0.63}, [1, 3]),
        ({"top_p": 0.9, "min_p": 0.4}, [1, 3, 4]),
    ],
)
def test_what_the_rules_leave(rules: dict[str, float], expected: list[int]) -> None:
    ids = candidates(scores_of(SHARES), replace(PLAIN, **rules))
    assert sorted(ids.tolist()) == expected


def test_the_lower_id_wins_ties() -> None:
    scores = np.zeros(10)
    assert candidates(scores, replace(PLAIN, top_k=3)).tolist() == [0, 1, 2]
    assert candidates(scores, replace(PLAIN, top_p=0.25)).tolist() == [0, 1, 2]
    assert SequenceSampler(GREEDY, []).sample(np.zeros(10, np.float32))[0] == 0


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.049, 0), (0.051, 1), (0.449, 1), (0.451, 2), (0.56, 3), (0.81, 4), (0.9999, 4)],
)
def test_draw_walks_along_the_running_sum(uniform: float, token: int) -> None:
    assert draw(scores_of(SHARES), np.arange(5), 1.0, uniform) == token


def test_temperature_sharpens_and_flattens() -> None:
    scores, ids = scores_of(SHARES), np.arange(5)
    assert draw(scores, ids, 1e-300, 0.999) == 1
    assert draw(scores, ids, 1e9, 0.5) == 2  # all alike
    cold = np.array(SHARES) ** 2 / (np.array(SHARES) ** 2).sum()
    boundary = cold[:2].sum()
    assert draw(scores, ids, 0.5, boundary - 1e-9) == 1
    assert draw(scores, ids, 0.5, boundary + 1e-9) == 2


@pytest.mark.parametrize(
    ("scores", "uniform", "token"),
    [([0.0, 0.0, -1e9], math.nextafter(1.0, 0.0), 1), ([-1e9, 0.0, 0.0], 0.0, 1)],
)
def test_no_uniform_draws_what_is_impossible(
    scores: list[float], uniform: float, token: int
) -> None:
    assert draw(np.array(scores), np.arange(3), 1.0, uniform) == token


def test_frequencies_follow_the_shares() -> None:
    sampler = SequenceSampler(PLAIN, [])
    logits = scores_of(SHARES).astype(np.float32)
    counts = Counter(sampler.sample(logits)[0] for _ in range(20_000))
    for token, share in enumerate(SHARES):
        assert abs(counts[token] / 20_000 - share) < 0.015


def test_repeat_penalty() -> None:
    scores = np.array([2.0, -2.0, 0.0, 3.0])
    assert penalised(scores, [0, 1, 2, 0], 2.0).tolist() == [1.0, -4.0, 0.0, 3.0]
    assert scores.tolist() == [2.0, -2.0, 0.0, 3.0]
    assert penalised(scores, [], 2.0).tolist() == scores.tolist()


def test_the_penalty_looks_back_64_tokens_and_sees_the_prompt() -> None:
    logits = np.zeros(100, np.float32)
    logits[7] = 1.0
    sampling = replace(GREEDY, repeat_penalty=1e6)
    logits[8] = 0.5
    assert SequenceSampler(sampling, [7]).sample(logits)[0] == 8
    assert SequenceSampler(sampling, [7] + [9] * 63).sample(logits)[0] == 8
    assert SequenceSampler(sampling, [7] + [9] * 64).sample(logits)[0] == 7
    sampler = SequenceSampler(sampling, [])
    drawn = [sampler.sample(logits)[0] for _ in range(3)]
    assert drawn == [7, 8, 7]  # both are penalised at last: 1e-6 against 5e-7


def test_log_probability_is_before_all_rules() -> None:
    logits = scores_of(SHARES).astype(np.float32) + 10
    sampling = replace(PLAIN, top_k=1, temperature=0.1, repeat_penalty=1.5)
    token, logprob = SequenceSampler(sampling, [0]).sample(logits)
    assert token == 1 and math.isclose(logprob, math.log(0.4), abs_tol=1e-5)
    assert log_probability(finite(np.array([0.0, -np.inf])), 1) == LOWEST_LOGPROB


def test_a_seed_repeats_and_sequences_are_apart() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 200), np.float32)
    sampling = replace(PLAIN, top_p=0.95, seed=42)
    alone = SequenceSampler(sampling, [1])
    expected = [alone.sample(row)[0] for row in logits]
    first, second = SequenceSampler(sampling, [1]), SequenceSampler(replace(sampling, seed=43), [1])
    both = [(first.sample(row)[0], second.sample(row)[0]) for row in logits]
    assert [a for a, _ in both] == expected
    assert [b for _, b in both] != expected


def test_one_uniform_per_token_whatever_the_rules() -> None:
    """The tenth token of a seed is drawn with the tenth number of its generator."""
    uniforms = np.random.Generator(np.random.PCG64(3)).random(10)
    flat = np.zeros(1000, np.float32)
    for rules in ({}, {"top_k": 1000}, {"top_p": 0.9999999}, {"min_p": 0.5}):
        sampler = SequenceSampler(replace(PLAIN, seed=3, **rules), [])
        drawn = [sampler.sample(flat)[0] for _ in range(10)]
        assert drawn == [int(uniform * 1000) for uniform in uniforms]


HOSTILE = [
    [math.nan] * 6,
    [math.inf] * 6,
    [-math.inf] * 6,
    [math.nan, math.inf, -math.inf, 0.0, 3.4e38, -3.4e38],
    [-math.inf, -math.inf, 5.0, -math.inf, math.nan, -math.inf],
    [0.0] * 6,
]


@pytest.mark.parametrize("logits", HOSTILE)
def test_hostile_logits_always_give_a_token(logits: list[float]) -> None:
    chance = random.Random(1)
    for _ in range(200):
        sampling = Sampling(
            temperature=chance.choice([0.0, 1e-300, 0.7, 1.0, 1e300]),
            top_k=chance.choice([0, 1, 3, 99]),
            top_p=chance.choice([0.0, 0.5, 1.0]),
            min_p=chance.choice([0.0, 0.1, 1.0]),
            repeat_penalty=chance.choice([1.0, 0.1, 1.3, 1e30]),
            seed=chance.randrange(2**63),
        )
        sampler = SequenceSampler(sampling, [0, 1, 2])
        for _ in range(3):
            token, logprob = sampler.sample(np.array(logits, np.float32))
            assert 0 <= token < 6
            assert LOWEST_LOGPROB <= logprob <= 0
    if not math.isnan(logits[2]) and logits[2] == 5.0:
        assert SequenceSampler(PLAIN, []).sample(np.array(logits, np.float32)) == (2, 0.0)


def test_random_logits_against_plain_rules() -> None:
    """The shortcuts (partition, dropping the unlikely before sorting) change nothing."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n_tokens = int(rng.integers(1, 60))
        scores = np.round(rng.standard_normal(n_tokens) * 3, 1)  # with ties
        rules = replace(
            PLAIN,
            top_k=int(rng.integers(0, 70)),
            top_p=float(rng.random()),
            min_p=float(rng.random()),
        )
        order = sorted(range(n_tokens), key=lambda token: (-scores[token], token))
        order = order[: rules.top_k or n_tokens]
        weights = [math.exp(scores[token]) for token in order]
        kept, running = [], 0.0
        for token, weight in zip(order, weights, strict=True):
            if running >= rules.top_p * sum(weights):
                break
            kept.append(token)
            running += weight
        least = math.exp(scores.max()) * rules.min_p
        expected = [token for token in kept if math.exp(scores[token]) >= least]
        assert candidates(scores, rules).tolist() == expected
