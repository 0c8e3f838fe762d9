"""Kept beginnings of sequences: what is shared, what stays, who goes first."""

import random

import pytest

from coordinator.core.prefixes import KeptPrefixes, n_common_blocks

LONG = tuple(range(1000))


@pytest.mark.parametrize(
    ("kept", "prompt", "n"),
    [
        ((), LONG, 0),
        (LONG[:63], LONG, 0),
        (LONG[:64], LONG, 1),
        (LONG[:200], LONG[:191], 2),
        ((7, *LONG[1:128]), LONG, 0),
        ((*LONG[:127], 7), LONG, 1),
    ],
)
def test_common_blocks(kept: tuple[int, ...], prompt: tuple[int, ...], n: int) -> None:
    assert n_common_blocks(kept, prompt) == n


def test_a_turn_takes_over_the_turn_before() -> None:
    prefixes = KeptPrefixes()
    assert prefixes.keep(1, LONG[:130], None) == (2, [])
    shared = prefixes.take(LONG[:300])
    assert shared is not None
    assert (shared.kept, shared.n_tokens) == (1, 128)
    assert prefixes.n_blocks == 2
    assert prefixes.keep(2, LONG[:310], shared) == (4, [1])
    prefixes.drop_user(shared)
    assert prefixes.n_blocks == 4
    prefixes.check()


def test_the_last_token_of_a_prompt_is_computed() -> None:
    prefixes = KeptPrefixes()
    prefixes.keep(1, LONG[:128], None)
    shared = prefixes.take(LONG[:128])
    assert shared is not None and shared.n_tokens == 64


def test_what_another_has_is_not_kept_twice() -> None:
    prefixes = KeptPrefixes()
    prefixes.keep(1, LONG[:256], None)
    assert prefixes.keep(2, LONG[:190], None) == (0, [])
    assert prefixes.n_blocks == 4


def test_too_short_to_keep() -> None:
    assert KeptPrefixes().keep(1, LONG[:63], None) == (0, [])


def test_the_least_recently_used_goes_first() -> None:
    prefixes = KeptPrefixes()
    prefixes.keep(1, LONG[:64], None)
    prefixes.keep(2, LONG[64:128], None)
    assert prefixes.oldest() == 1
    prefixes.drop_user(prefixes.take(LONG[:100]))
    assert prefixes.oldest() == 2


def test_blocks_that_a_running_sequence_uses_outlive_their_keeper() -> None:
    prefixes = KeptPrefixes()
    prefixes.keep(1, LONG[:192], None)
    shared = prefixes.take(LONG[:130])
    prefixes.forget(1)
    assert prefixes.n_blocks == 2
    prefixes.drop_user(shared)
    assert prefixes.n_blocks == 0


def test_random_sequences_never_lose_or_leak_a_block() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        prefixes, running = KeptPrefixes(), {}
        for number in range(60):
            prompt = tuple(rng.randrange(2) for _ in range(3)) * 60
            shared = prefixes.take(prompt)
            running[number] = (prompt, shared)
            if rng.random() < 0.2 and (oldest := prefixes.oldest()) is not None:
                prefixes.forget(oldest)
            if rng.random() < 0.7:
                ended = rng.choice(list(running))
                prompt, shared = running.pop(ended)
                prefixes.keep(ended, prompt[: rng.randrange(len(prompt))], shared)
                prefixes.drop_user(shared)
            prefixes.check()
        for _, shared in running.values():
            prefixes.drop_user(shared)
        while (oldest := prefixes.oldest()) is not None:
            prefixes.forget(oldest)
        assert prefixes.n_blocks == 0
