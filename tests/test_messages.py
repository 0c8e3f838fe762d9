"""Every message there and back, and what is no message: always the one error, never another."""

import random
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from random_messages import random_instance

from shm.codec import MessageError
from shm.messages import MESSAGES, Heartbeat, decode, encode

N_GARBAGE = 100_000


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_there_and_back(kind: type) -> None:
    rng = random.Random(kind.__name__)
    for _ in range(100):
        message = random_instance(kind, rng)
        assert decode(encode(message)) == message
        assert type(decode(encode(message))) is kind


def test_names_are_their_tags_and_differ() -> None:
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)
    assert all(kind.__doc__ for kind in MESSAGES)


def refused(data: bytes) -> bool:
    """Whether it is refused; anything but the one error fails the test."""
    try:
        decode(data)
    except MessageError as error:
        assert len(str(error)) < 300
        return True
    return False


def test_garbage_is_refused_quickly_and_without_memory() -> None:
    rng = random.Random(11)
    pieces = [rng.randbytes(rng.randrange(40)) for _ in range(N_GARBAGE)]
    tracemalloc.start()
    started = time.process_time()
    n_refused = sum(map(refused, pieces))
    seconds = time.process_time() - started
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_refused == N_GARBAGE
    assert seconds < 30
    assert peak_bytes < 4_000_000


def test_damaged_messages_are_refused_or_are_messages() -> None:
    """A bit that flips may give another number; it never gives another exception."""
    rng = random.Random(12)
    n_refused = 0
    for number in range(8_000):
        data = bytearray(encode(random_instance(MESSAGES[number % len(MESSAGES)], rng)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cut = rng.randrange(len(data)) if rng.random() < 0.2 else len(data)
        n_refused += refused(bytes(data[:cut]))
    assert n_refused > 2_000


def absurd(rng: random.Random, depth: int = 0) -> Any:
    """Valid msgpack of the wrong kind."""
    kind = rng.randrange(9 if depth < 3 else 6)
    return [
        lambda: rng.choice([-1, 2**63, 2**64 - 1, -(2**63)]),
        lambda: None,
        lambda: rng.choice([float("nan"), float("inf"), 0.1]),
        lambda: rng.choice(["", "x" * 1000]),
        lambda: rng.choice([True, False]),
        lambda: rng.randbytes(5),
        lambda: [absurd(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {"key": absurd(rng, depth + 1)},
        lambda: [1] * 500,
    ][kind]()


def test_right_tags_with_absurd_fields_are_refused() -> None:
    rng = random.Random(13)
    n_refused = 0
    for number in range(20_000):
        kind = MESSAGES[number % len(MESSAGES)]
        fields = [absurd(rng) for _ in range(rng.randrange(7))]
        n_refused += refused(msgpack.packb([kind.__name__, *fields]))
    assert n_refused > 18_000


@pytest.mark.parametrize("tag", ["", "hello", "Hello ", "SlotState", "__class__", "x" * 5000])
def test_an_unknown_tag(tag: str) -> None:
    with pytest.raises(MessageError, match="unknown tag"):
        decode(msgpack.packb([tag, 1]))


def test_only_the_declared_messages_are_sent() -> None:
    assert decode(encode(Heartbeat("io0", 3))) == Heartbeat("io0", 3)
    with pytest.raises((AttributeError, TypeError)):
        encode(object())
