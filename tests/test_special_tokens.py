"""Cutting a text at special tokens, against cutting at one token after the other."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.special_tokens import split_special

SPLITS: list[tuple[str, dict[str, int], list[str | int]]] = [
    ("", {"<a>": 1}, []),
    ("xy", {"<a>": 1}, ["xy"]),
    ("<a>", {"<a>": 1}, [1]),
    ("x<a><a>y", {"<a>": 1}, ["x", 1, 1, "y"]),
    # the longer one is found everywhere before the shorter one
    ("     ", {"   ": 3, "  ": 2}, [3, 2]),
    ("abcd", {"bcd": 1, "abc": 2}, ["a", 1]),
    # found in what is left only, never across a token that was cut out
    ("a<x>b", {"<x>": 1, "ab": 2}, ["a", 1, "b"]),
]


@pytest.mark.parametrize(("text", "special", "fragments"), SPLITS)
def test_split_special(text: str, special: dict[str, int], fragments: list[str | int]) -> None:
    assert split_special(text, special) == fragments


def split_one_after_the_other(text: str, special: list[str]) -> list[str | int]:
    """Split what is left of the text at each token in turn."""
    fragments: list[str | int] = [text]
    for token_id, token in enumerate(special):
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            for index, part in enumerate(fragment.split(token)):
                cut += [token_id, part] if index else [part]
        fragments = cut
    return [fragment for fragment in fragments if fragment != ""]


@settings(deadline=None)
@given(
    st.text(alphabet="<ab>", max_size=30),
    st.lists(st.text(alphabet="<ab>", min_size=1, max_size=4), max_size=5, unique=True),
)
def test_split_special_of_any_text(text: str, special: list[str]) -> None:
    numbered = {token: token_id for token_id, token in enumerate(special)}
    assert split_special(text, numbered) == split_one_after_the_other(text, special)


def test_splitting_takes_linear_time() -> None:
    special = {f"<|reserved_{index:04}|>": index for index in range(1000)}
    text = "a".join(special) * 30
    start = time.process_time()
    assert len(split_special(text, special)) == 30 * 1999
    assert time.process_time() - start < 4
