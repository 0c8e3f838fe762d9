"""Tokenizers built from small vocabularies: encoding, decoding, special tokens, flags."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabulary import (
    CONTROL,
    NORMAL,
    PATH,
    UNUSED,
    USER_DEFINED,
    byte_pair_metadata,
    pieces_of,
    sentence_piece_metadata,
)

from coordinator.text.tokenizer import (
    MAX_TEXT_BYTES,
    SPACE_MARK,
    TokenizerError,
    build_tokenizer,
)

# Byte pairs


def test_merges_by_rank_not_by_length() -> None:
    metadata = byte_pair_metadata(words=())
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    metadata |= {
        "tokenizer.ggml.tokens": [*tokens, "bc", "ab", "abc"],
        "tokenizer.ggml.token_type": [*types, NORMAL, NORMAL, NORMAL],
        "tokenizer.ggml.merges": ["b c", "a b", "ab c"],
    }
    # "b c" comes first, so "ab" and then "abc" are never reached
    assert pieces_of(build_tokenizer(metadata, PATH), "abc ab") == ["a", "bc", "Ġ", "ab"]
    # a pre-tokenizer that takes whole words looks at no merge where the word is a token
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert pieces_of(build_tokenizer(metadata, PATH), "abc") == ["abc"]


ROUND_TRIPS = [
    "",
    "Hello the world\n\n12",
    "  \n \n\n \t\t  \r\n x  ",
    "it's 3.14 ½ HTTPServer __init__(self): /* a//b */",
    "Ünïcödé Български ქართული e\u0301 日本語とカタカナ 中文，标点。 한국어",
    "🚀 😶\u200d🌫️ ✅\u00a0x\u2028y\x85z",
    "\x00\x07\x1b[0m\x7f\ufffd",
]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "deepseek-llm", "kimi-k2"])
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_byte_pairs_give_the_text_back(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(pre=pre), PATH)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text


def test_bytes_of_tokens() -> None:
    special = (("<|endoftext|>", CONTROL), ("[PAD]", UNUSED), ("<é >", USER_DEFINED))
    tokenizer = build_tokenizer(byte_pair_metadata(special=special), PATH)
    first = tokenizer.vocabulary_size - 3
    assert [tokenizer.token_bytes(first + n) for n in range(3)] == [b"", b"", "<é >".encode()]
    assert tokenizer.token_text(first) == "<|endoftext|>"
    letter, *_ = tokenizer.encode("a", add_special=False, parse_special=False)
    assert tokenizer.decode([first, letter]) == "a"
    half, _ = tokenizer.encode("é", add_special=False, parse_special=False)
    assert tokenizer.token_bytes(half) == b"\xc3"
    assert tokenizer.decode([half]) == "\ufffd"


@pytest.mark.parametrize("bad", [-1, 10_000, 1 << 40])
def test_ids_out_of_range(bad: int) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(), PATH)
    with pytest.raises(IndexError, match=f"token {bad}: expected an id below"):
        tokenizer.token_bytes(bad)


@pytest.mark.parametrize(
    ("text", "shown"), [("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "😀"), ("x\udcff", "x\ufffd")]
)
def test_lone_surrogates(text: str, shown: str) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(), PATH)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == shown


def test_too_long_a_text_is_refused() -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(), PATH)
    with pytest.raises(TokenizerError, match=f"expected at most {MAX_TEXT_BYTES} bytes"):
        tokenizer.encode("é" * (MAX_TEXT_BYTES // 2 + 1), add_special=False, parse_special=False)


# Special tokens


def test_control_tokens_are_parsed_on_demand_only() -> None:
    special = (("<|im_end|>", CONTROL), ("<think>", USER_DEFINED))
    tokenizer = build_tokenizer(byte_pair_metadata(special=special), PATH)
    text = "a<|im_end|><think>"
    parsed = pieces_of(tokenizer, text, parse_special=True)
    literal = pieces_of(tokenizer, text, parse_special=False)
    assert parsed == ["a", "<|im_end|>", "<think>"]
    # user-defined tokens are parsed in any case, as in llama.cpp
    assert literal == [*"a<|im_end|>", "<think>"]


def test_longer_special_tokens_are_tried_first() -> None:
    special = (("  ", USER_DEFINED), ("    ", USER_DEFINED), ("é é", USER_DEFINED))
    tokenizer = build_tokenizer(byte_pair_metadata(special=special), PATH)
    assert pieces_of(tokenizer, "x      y") == ["x", "    ", "  ", "y"]


FLAGS: list[tuple[dict[str, Any], bool, bool]] = [
    # keys of the file, then whether BOS and EOS are put around "a"
    ({"bos_token_id": 0, "eos_token_id": 1}, False, False),
    ({"bos_token_id": 0, "add_bos_token": True}, True, False),
    ({"bos_token_id": 0, "eos_token_id": 1, "add_eos_token": True}, False, True),
    ({"bos_token_id": 0, "pre": "llama-bpe"}, True, False),
    ({"bos_token_id": 0, "pre": "llama-bpe", "add_bos_token": False}, False, False),
    # nothing to add where the file names no token
    ({"pre": "llama-bpe"}, False, False),
    ({"add_bos_token": True, "add_eos_token": True}, False, False),
]


@pytest.mark.parametrize(("keys", "add_bos", "add_eos"), FLAGS)
def test_bos_and_eos(keys: dict[str, Any], add_bos: bool, add_eos: bool) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(**keys), PATH)
    plain = tokenizer.encode("a", add_special=False, parse_special=False)
    ids = tokenizer.encode("a", add_special=True, parse_special=False)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (add_bos, add_eos)
    assert ids == [0] * add_bos + plain + [1] * add_eos


@pytest.mark.parametrize("text", ["a", "\n", "\u0301", " "])
def test_merging_takes_linear_time(text: str) -> None:
    words_of_one = tuple(text * n for n in (2, 4, 8, 16))
    tokenizer = build_tokenizer(byte_pair_metadata(words=words_of_one, pre="qwen2"), PATH)
    long = text * ((1 << 18) // len(text.encode()))
    start = time.process_time()
    ids = tokenizer.encode(long, add_special=False, parse_special=True)
    assert time.process_time() - start < 4
    assert tokenizer.decode(ids) == long


def test_a_missing_pre_tokenizer_is_named() -> None:
    assert build_tokenizer(byte_pair_metadata(), PATH).warning is None
    tokenizer = build_tokenizer(byte_pair_metadata(pre=None), PATH)
    assert "tokenizer.ggml.pre is missing" in str(tokenizer.warning)


# Pieces with scores


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the pair with the best score, the leftmost of equals, until none is left."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        _, index = min(pairs)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


# Best score first; in the file they stand in another order.
BY_SCORE = [
    "▁a",
    "ab",
    "▁ab",
    "ba",
    "bab",
    "aba",
    "▁▁",
    "▁▁▁▁",
    "éa",
    "aa",
    "aaa",
    "aaaa",
    "b▁",
    "abba",
]
PIECES = {text: -float(BY_SCORE.index(text)) for text in sorted(BY_SCORE)}


@settings(deadline=None)
@given(st.text(alphabet="aaab é", max_size=20))
def test_pieces_are_merged_by_score(text: str) -> None:
    metadata = sentence_piece_metadata(tuple(PIECES.items()), add_space_prefix=False)
    tokenizer = build_tokenizer(metadata, PATH)
    expected = merged_by_score(text.replace(" ", SPACE_MARK), PIECES)
    assert pieces_of(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


def test_pieces_fall_back_to_bytes() -> None:
    tokenizer = build_tokenizer(sentence_piece_metadata(), PATH)
    assert pieces_of(tokenizer, "abñ\n") == ["▁ab", "<0xC3>", "<0xB1>", "<0x0A>"]
    ids = tokenizer.encode("ab ñ\n🦙", add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == " ab ñ\n🦙"


SPACE_PREFIXES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "ab", ["▁ab"]),
    ({}, " ab", ["▁", "▁ab"]),
    ({}, "", []),
    # after a special token too, as in llama.cpp
    ({}, "ab</s>ab", ["▁ab", "</s>", "▁ab"]),
    ({"add_space_prefix": True}, "ab", ["▁ab"]),
    ({"add_space_prefix": False}, "ab", ["ab"]),
]


@pytest.mark.parametrize(("keys", "text", "pieces"), SPACE_PREFIXES)
def test_space_prefix(keys: dict[str, Any], text: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(sentence_piece_metadata(**keys), PATH)
    assert pieces_of(tokenizer, text, parse_special=True) == pieces


def test_defaults_of_a_vocabulary_with_scores() -> None:
    tokenizer = build_tokenizer(sentence_piece_metadata(), PATH)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.stop_ids == {2}
    assert tokenizer.encode("ab", add_special=True, parse_special=False)[0] == 1
    assert tokenizer.encode("", add_special=True, parse_special=False) == [1]


def test_text_of_a_control_token_is_never_merged_into_it() -> None:
    pieces = (("<s", -1.0), ("s>", -2.0))
    tokenizer = build_tokenizer(sentence_piece_metadata(pieces, add_space_prefix=False), PATH)
    assert pieces_of(tokenizer, "<s>") == ["<s", ">"]


UNKNOWN_KINDS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "t5"}, "tokenizer.ggml.model", "gpt2, llama"),
    ({"model": None}, "tokenizer.ggml.model", "gpt2, llama"),
    ({"model": 7}, "tokenizer.ggml.model", "gpt2, llama"),
    ({"pre": "superbpe"}, "tokenizer.ggml.pre", "qwen2"),
    ({"pre": "gpt2\x1b[31m"}, "tokenizer.ggml.pre", "qwen2"),
    ({"pre": 3}, "tokenizer.ggml.pre", "qwen2"),
]


@pytest.mark.parametrize(("keys", "field", "known"), UNKNOWN_KINDS)
def test_unknown_kinds_are_refused_by_name(keys: dict[str, Any], field: str, known: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        build_tokenizer(byte_pair_metadata(**keys), PATH)
    text = str(caught.value)
    assert text.startswith(f"{PATH}: {field}: expected one of") and known in text
    assert repr(next(iter(keys.values()))) in text
    assert text.isprintable()
