"""What is claimed and what is not: intervals, sentences, the effect that is there or not."""

import pytest
from bench_blocks import ROOM, block, blocks

from coordinator.bench.answers import MIN_CLAIM_PAIRS, Answer, answer_of, widths
from coordinator.bench.questions import Pair, Sweep
from coordinator.bench.records import Record
from coordinator.bench.rooms import Room

WHOLE = (Room(ROOM),)
SMALL, LARGE = Room("20% of the experts in the pool"), Room("60% of the experts in the pool")
PAIR = Pair("a separate I/O process", "reading inline", "b", "a")


def answer(records: list[Record], pair: Pair = PAIR, rooms: tuple[Room, ...] = WHOLE) -> Answer:
    return answer_of(records, Sweep("io-process", (), (pair,)), rooms, 2 << 30)


def verdict(records: list[Record]) -> str:
    return answer(records).claims[0].findings[0].verdict


@pytest.mark.parametrize(
    ("speeds", "n_rounds", "expected", "words"),
    [
        ({"a": 10, "b": 13}, 8, "more", "a separate I/O process is 1."),
        ({"a": 10, "b": 7}, 8, "less", "a separate I/O process is 0."),
        ({"a": 10, "b": 10}, 8, "none", "no difference found between a separate I/O process and "
         "reading inline (at most 0."),
        ({"a": 10, "b": 13}, MIN_CLAIM_PAIRS - 1, "few", "5 pairs are too few for a claim (1."),
        ({"a": 10}, 8, "nothing", "nothing was measured of"),
    ],
)  # fmt: skip
def test_verdicts(speeds: dict[str, float], n_rounds: int, expected: str, words: str) -> None:
    records = blocks(speeds, n_rounds, seed=1)
    assert verdict(records) == expected
    headline = answer(records).headline
    assert headline.startswith("On this machine ") and words in headline
    assert ("as fast as" in headline) == (expected in ("more", "less"))


def test_two_identical_arms_are_told_apart_in_at_most_4_of_20_runs() -> None:
    verdicts = [verdict(blocks({"a": 10, "b": 10}, 6, seed)) for seed in range(20)]
    assert verdicts.count("none") >= 16


def test_an_effect_is_found_in_nearly_every_run() -> None:
    verdicts = [verdict(blocks({"a": 10, "b": 11}, 6, seed)) for seed in range(20)]
    assert verdicts.count("more") >= 18


def test_a_room_of_its_own_for_each_part_of_the_sentence() -> None:
    records = blocks({"a": 10, "b": 13}, 8, 1, SMALL.name)
    records += blocks({"a": 10, "b": 10}, 8, 1, LARGE.name)
    said = answer(records, rooms=(SMALL, LARGE)).headline
    first, second = said.split("; ")
    assert first.endswith("as fast as reading inline with 20% of the experts in the pool")
    assert second.startswith("no difference found (at most ")
    assert second.endswith("with 60% of the experts in the pool.")


def test_pairs_across_rooms_are_paired_by_round() -> None:
    records = blocks({"a": 10}, 8, 1, SMALL.name) + blocks({"a": 20}, 8, 1, LARGE.name)
    pair = Pair("60 %", "20 %", "a", "a", (LARGE, SMALL))
    (claim,) = answer(records, pair, (SMALL, LARGE)).claims
    (found,) = claim.findings
    assert found.ratio is not None and found.ratio.median == pytest.approx(2)  # the same noise
    assert claim.sentence == "On this machine 60 % is 2.00 × [2.00, 2.00] as fast as 20 %."


def test_bytes_are_told_with_what_they_would_make() -> None:
    records = [
        block(arm, n, 10, bytes={"per_token": n_bytes, "measured": 1})
        for n in range(6)
        for arm, n_bytes in (("a", 200), ("b", 100))
    ]
    said = answer(records, Pair("q2", "q4", "b", "a", what="bytes")).headline
    assert "q2 reads 0.50 × [0.50, 0.50] the bytes per token of q4" in said
    assert "would make it 2.00 × as fast" in said


def test_a_name_may_hold_anything() -> None:
    records = blocks({"a": 10, "b": 13}, 8, 1)
    said = answer(records, Pair("{b}", "{} of {1}", "b", "a")).headline
    assert said.startswith("On this machine {b} is 1.") and said.endswith(" as fast as {} of {1}.")


def test_failed_blocks_take_their_pairs_with_them() -> None:
    records = blocks({"a": 10, "b": 13}, 6, 1)
    records[-1]["error"] = "exit -9"
    assert verdict(records) == "few"


def test_a_small_model_is_no_answer() -> None:
    records = blocks({"a": 10, "b": 13}, 8, 1)
    found = answer_of(records, Sweep("io-process", (), (PAIR,)), WHOLE, 10 << 20)
    assert found.is_too_small and found.headline.startswith("too small to answer: ")
    named = answer_of(records, Sweep("arms", (), (PAIR,)), WHOLE, 10 << 20)
    assert not named.is_too_small


def test_how_wide_the_intervals_became() -> None:
    said = widths(answer(blocks({"a": 10, "b": 13}, 8, 1)))
    assert said is not None and said.startswith("8 pairs; the intervals are ")
    assert widths(answer(blocks({"a": 10, "b": 13}, 1, 1))) == (
        "1 pair of each: too few for an interval, which takes 5"
    )
    assert widths(answer([])) is None
