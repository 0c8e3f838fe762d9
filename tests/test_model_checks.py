"""Limits of keys and the lookup of tensors, without a file."""

from typing import Any

import pytest

from compute_worker.model_checks import Keys, Tensors
from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.model_file import Model

KEYS = Keys("m.gguf", "a", {"a.n": 7, "a.x": 0.5, "a.flag": True, "a.nan": float("nan")})
TENSORS = {
    "w": TensorInfo("w", (32, 4), 8, 0, 0, 136),
    "e": TensorInfo("e", (32, 4, 2), 0, 1, 0, 1024),
}
MODEL = Model(("m-1.gguf", "m-2.gguf"), (1, 1), {}, TENSORS, "")


def test_values_within_limits() -> None:
    assert KEYS.integer("n", 7, 7) == 7
    assert KEYS.integer("absent", 0, 9, default=3) == 3
    assert KEYS.real("x", 0.5, 0.5) == 0.5
    assert KEYS.real("absent", 0.0, 1.0, default=1.0) == 1.0


@pytest.mark.parametrize(
    ("kind", "key", "low", "high"),
    [
        ("integer", "n", 8, 9),
        ("integer", "n", 0, 6),
        ("integer", "x", 0, 9),  # no float is an integer
        ("integer", "flag", 0, 9),  # nor is a truth value
        ("integer", "absent", 0, 9),
        ("real", "x", 0.6, 1.0),
        ("real", "n", 0.0, 9.0),
        ("real", "nan", 0.0, 9.0),
        ("real", "absent", 0.0, 9.0),
    ],
)
def test_values_out_of_limits(kind: str, key: str, low: Any, high: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"^m\.gguf: a\.{key}: expected .+ found "):
        getattr(KEYS, kind)(key, low, high)


def test_a_default_is_checked_too() -> None:
    with pytest.raises(ModelFormatError, match="found nothing"):
        KEYS.integer("absent", 5, 9, default=3)


def test_tensors_are_found_and_the_rest_is_refused() -> None:
    lookup = Tensors(MODEL)
    assert lookup.find("w", (32, 4), frozenset({"Q8_0"})) is TENSORS["w"]
    with pytest.raises(ModelFormatError, match=r"^m-2\.gguf: e: expected no such tensor in this"):
        lookup.refuse_rest("this")
    lookup.find("e", (32, 4, 2), frozenset({"F32"}))
    lookup.refuse_rest("this")


@pytest.mark.parametrize(
    ("name", "shape", "types", "text"),
    [
        ("x", (1,), {"F32"}, "m-1.gguf: x: expected a tensor of shape [1], found none"),
        ("w", (4, 32), {"Q8_0"}, "m-1.gguf: w: expected shape [4, 32], found [32, 4]"),
        ("w", (32, 4), {"F16", "F32"}, "m-1.gguf: w: expected type F16, F32, found Q8_0"),
        ("e", (32, 4, 3), {"F32"}, "m-2.gguf: e: expected 3 experts, found 2"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, shape: tuple[int, ...], types: set[str], text: str
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        Tensors(MODEL).find(name, shape, frozenset(types))
    assert str(caught.value) == text
