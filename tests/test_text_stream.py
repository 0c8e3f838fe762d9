"""Streaming text: what is printed does not depend on how the text was cut into tokens."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.stream import TextStream


class Pieces:
    """A vocabulary in which token i prints the i-th piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str, str | None]:
    """What each push printed, what finish printed, and the stop string that was met."""
    text = TextStream(Pieces(pieces), stop)
    pushed = [text.push(token_id) for token_id in range(len(pieces))]
    return pushed, text.finish(), text.stopped


E_ACUTE, LLAMA = "é".encode(), "🦙".encode()

CASES = [
    # pieces, stop strings, what each push prints, what finish prints, the stop string met
    ([b"Hello", b" world"], (), ["Hello", " world"], "", None),
    ([b"a", b"", b"b"], (), ["a", "", "b"], "", None),
    # characters over token borders
    ([E_ACUTE[:1], E_ACUTE[1:]], (), ["", "é"], "", None),
    ([LLAMA[:1], LLAMA[1:2], LLAMA[2:3], LLAMA[3:]], (), ["", "", "", "🦙"], "", None),
    ([b"x" + LLAMA[:3], LLAMA[3:] + b"y"], (), ["x", "🦙y"], "", None),
    # bytes that can never become a character show at once, unfinished ones at the end
    ([b"\xff", b"a"], (), ["\ufffd", "a"], "", None),
    ([LLAMA[:2], b"a"], (), ["", "\ufffda"], "", None),
    ([b"a", LLAMA[:3]], (), ["a", ""], "\ufffd", None),
    ([b"\x80\x80"], (), ["\ufffd\ufffd"], "", None),
    # stop strings over token borders
    ([b"one\n", b"\ntwo"], ("\n\n",), ["one", ""], "", "\n\n"),
    ([b"one\n", b"two"], ("\n\n",), ["one", "\ntwo"], "", None),
    ([b"one\n"], ("\n\n",), ["one"], "\n", None),
    ([b"ST", b"O", b"P it"], ("STOP",), ["", "", ""], "", "STOP"),
    ([b"ST", b"O", b"NE"], ("STOP",), ["", "", "STONE"], "", None),
    ([b"aa", b"aab"], ("aaab",), ["", "a"], "", "aaab"),
    ([b"x STOP y"], ("STOP",), ["x "], "", "STOP"),
    ([b"STOP", b"more"], ("STOP",), ["", ""], "", "STOP"),
    ([b"caf" + E_ACUTE[:1], E_ACUTE[1:]], ("é",), ["caf", ""], "", "é"),
    # the stop string that is complete first counts, then the longest
    ([b"abc"], ("abc", "b"), ["a"], "", "b"),
    ([b"a", b"b", b"c"], ("abc", "b"), ["", "a", ""], "", "b"),
    ([b"xabc"], ("c", "abc"), ["x"], "", "abc"),
    ([b"ab", b"d"], ("abc", "bd"), ["", "a"], "", "bd"),
    # one that only the end of the stream completes
    ([b"a", LLAMA[:1]], ("\ufffd",), ["a", ""], "", "\ufffd"),
]


@pytest.mark.parametrize(("pieces", "stop", "pushed", "finished", "stopped"), CASES)
def test_cases(
    pieces: list[bytes],
    stop: tuple[str, ...],
    pushed: list[str],
    finished: str,
    stopped: str | None,
) -> None:
    assert stream(pieces, stop) == (pushed, finished, stopped)


def test_no_empty_stop_string() -> None:
    with pytest.raises(AssertionError):
        TextStream(Pieces([]), ("",))


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that ends first, by looking at every end in turn."""
    for end in range(1, len(text) + 1):
        met = [word for word in stop if text[:end].endswith(word)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


texts = st.text(alphabet="aab\n é🦙", max_size=30).map(str.encode)
noise = st.binary(max_size=12)
stops = st.lists(st.text(alphabet="ab\né🦙", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(deadline=None)
@given(st.lists(texts | noise, max_size=4).map(b"".join), stops, st.data())
def test_any_split_prints_the_same(data: bytes, stop: tuple[str, ...], draw: st.DataObject) -> None:
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=20).map(sorted))
    borders = [0, *cuts, len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(borders)]
    pushed, finished, stopped = stream(pieces, stop)
    expected = first_stop(data.decode("utf-8", "replace"), stop)
    assert ("".join(pushed) + finished, stopped) == expected


@settings(deadline=None)
@given(st.lists(texts, max_size=8), stops)
def test_never_holds_back_more_than_could_begin_a_stop(
    pieces: list[bytes], stop: tuple[str, ...]
) -> None:
    text = TextStream(Pieces(pieces), stop)
    printed = ""
    for token_id in range(len(pieces)):
        printed += text.push(token_id)
        seen = b"".join(pieces[: token_id + 1]).decode()
        if text.stopped is None:
            held = seen.removeprefix(printed)
            assert seen.startswith(printed)
            assert held == "" or any(word.startswith(held) for word in stop)
