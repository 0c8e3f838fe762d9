"""Random instances of the messages, made from their declarations."""

import dataclasses
import random
import types
import typing
from typing import Any

from shm.codec import MAX_INTEGER

INTEGERS = (0, 1, 127, 128, 255, 256, 65535, 2**31, 2**32, MAX_INTEGER)
TEXTS = ("", "io0", "compute", "naïve — ☃ 𝄞", "x" * 300, "\0\n")
REALS = (0.0, -0.0, 1.0, -1.5, 1e308, 5e-324, float("inf"))


def random_instance(hint: Any, rng: random.Random) -> Any:
    """A value of a declared type, edge cases often."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        kinds = [arguments[0]] * rng.choice([0, 1, 3, 20]) if arguments[-1] is ... else arguments
        return tuple(random_instance(kind, rng) for kind in kinds)
    if origin is types.UnionType:
        return random_instance(rng.choice(arguments), rng)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        values = {k: random_instance(kind, rng) for k, kind in typing.get_type_hints(hint).items()}
        return typing.cast(Any, hint)(**values)
    choices: dict[Any, Any] = {
        int: lambda: rng.choice([*INTEGERS, rng.randrange(MAX_INTEGER)]),
        str: lambda: rng.choice(TEXTS),
        float: lambda: rng.choice([*REALS, rng.random()]),
        bool: lambda: rng.random() < 0.5,
        bytes: lambda: rng.randbytes(rng.choice([0, 1, 300])),
        types.NoneType: lambda: None,
    }
    return choices[hint]()
