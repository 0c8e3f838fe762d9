"""Vocabularies as files bring them: what is refused, and which tokens end an answer."""

from typing import Any

import pytest
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

from coordinator.text.tokenizer import build_tokenizer, byte_of_character
from io_worker.gguf_header import ModelFormatError

ALL_BYTES = list(byte_of_character())
N_TOKENS = len(byte_pair_metadata()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
REST = N_TOKENS - 1
NAN, INFINITE = float("nan"), float("inf")
BAD: list[tuple[dict[str, Any], str, str]] = [
    # keys changed, the key named in the error, what the error says
    ({"tokens": None}, "tokens", "at least one token"),
    ({"tokens": []}, "tokens", "at least one token"),
    ({"tokens": "abc"}, "tokens", "expected an array, found str"),
    ({"tokens": [1, 2]}, "tokens", "expected an array of str"),
    ({"tokens": ["a", "b", "a"]}, "tokens", "found 'a' as tokens 0 and 2"),
    ({"tokens": ["a" * 2000]}, "tokens", "at most 1024 characters, found 2000"),
    ({"tokens": ALL_BYTES[:-1], "token_type": None}, "merges", "merge 0: expected tokens, found"),
    ({"token_type": [1]}, "token_type", "as there are tokens, found 1"),
    ({"token_type": [1] * 10_000}, "token_type", "found 10000"),
    ({"token_type": [7] + [1] * REST}, "token_type", "token 0: expected 0..6, found 7"),
    ({"token_type": [-1] + [1] * REST}, "token_type", "token 0: expected 0..6, found -1"),
    ({"token_type": [True] * N_TOKENS}, "token_type", "expected an array of int"),
    ({"token_type": [6] + [1] * REST}, "tokens", "token 0: expected <0x00> to <0xFF>, found '!'"),
    ({"scores": [0.0]}, "scores", "found 1"),
    ({"scores": [0.0] * REST + [NAN]}, "scores", f"token {REST}: expected a finite score"),
    ({"scores": [INFINITE] + [0.0] * REST}, "scores", "token 0: expected a finite score"),
    ({"merges": None}, "merges", "expected merges, found none"),
    ({"merges": []}, "merges", "expected merges, found none"),
    ({"merges": ["ab"]}, "merges", "merge 0: expected two tokens, found 'ab'"),
    ({"merges": ["a "]}, "merges", "merge 0: expected two tokens"),
    ({"merges": [" b"]}, "merges", "merge 0: expected two tokens"),
    ({"merges": [""]}, "merges", "merge 0: expected two tokens"),
    ({"merges": ["Ġ t", "Q Q"]}, "merges", "merge 1: expected tokens, found 'QQ'"),
    ({"merges": ["QQ a"]}, "merges", "merge 0: expected tokens, found 'QQ'"),
    ({"merges": ["a b c"]}, "merges", "found 'b c'"),
    ({"bos_token_id": N_TOKENS}, "bos_token_id", f"expected an id below {N_TOKENS}, found"),
    ({"eos_token_id": -1}, "eos_token_id", "found -1"),
    ({"eot_token_id": 1 << 31}, "eot_token_id", "found 2147483648"),
    ({"unknown_token_id": "0"}, "unknown_token_id", "expected int, found str"),
    ({"add_bos_token": 1}, "add_bos_token", "expected bool, found int"),
]


@pytest.mark.parametrize(("keys", "field", "says"), BAD)
def test_bad_vocabularies(keys: dict[str, Any], field: str, says: str) -> None:
    metadata = byte_pair_metadata(**keys)
    with pytest.raises(ModelFormatError) as caught:
        build_tokenizer(metadata, PATH)
    assert caught.value.field == f"tokenizer.ggml.{field}"
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["<0x-1>", "<0x100>", "<0xFG>", "<0xff>", "<0x1>", "0x41", "<0x٣٣>", "<0x41>\n"]
)
def test_bad_byte_tokens(text: str) -> None:
    metadata = sentence_piece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[3] = text
    with pytest.raises(ModelFormatError, match="token 3: expected <0x00> to <0xFF>"):
        build_tokenizer(metadata, PATH)


def test_scores_are_needed_for_pieces() -> None:
    with pytest.raises(ModelFormatError, match="expected scores, found none"):
        build_tokenizer(sentence_piece_metadata(scores=None), PATH)


def test_empty_tokens_are_kept_apart() -> None:
    special = (("<x>", CONTROL), ("[PAD]", UNUSED))
    metadata = byte_pair_metadata(words=("ab",), special=special)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    tokens += ["", ""]
    types += [UNUSED, UNUSED]
    tokenizer = build_tokenizer(metadata, PATH)
    assert tokenizer.vocabulary_size == len(tokens)
    assert tokenizer.token_bytes(len(tokens) - 1) == b""
    assert pieces_of(tokenizer, "ab<x>", parse_special=True) == ["ab", "<x>"]


STOPS: list[tuple[tuple[tuple[str, int], ...], dict[str, Any], set[str]]] = [
    ((("<|endoftext|>", CONTROL), ("<|im_end|>", CONTROL)), {}, {"<|endoftext|>", "<|im_end|>"}),
    ((("<|eot_id|>", NORMAL),), {}, {"<|eot_id|>"}),
    # plain words unless the file marks them
    ((("</s>", NORMAL), ("[EOS]", NORMAL)), {}, set()),
    ((("</s>", CONTROL), ("[EOS]", USER_DEFINED)), {}, {"</s>", "[EOS]"}),
    # what the file names itself
    ((), {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 3}, {'"', "#", "$"}),
    # <|end|> ends a part only, where others end the answer
    ((("<|end|>", CONTROL),), {}, {"<|end|>"}),
    (
        (("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)),
        {},
        {"<|return|>", "<|call|>"},
    ),
]


@pytest.mark.parametrize(("special", "keys", "texts"), STOPS)
def test_stop_ids(
    special: tuple[tuple[str, int], ...], keys: dict[str, Any], texts: set[str]
) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(special=special, **keys), PATH)
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.stop_ids} == texts


@pytest.mark.parametrize("marked", [NORMAL, USER_DEFINED, CONTROL])
def test_texts_that_end_an_answer_count_as_control_tokens(marked: int) -> None:
    tokenizer = build_tokenizer(byte_pair_metadata(special=(("<|im_end|>", marked),)), PATH)
    assert pieces_of(tokenizer, "a<|im_end|>", parse_special=True) == ["a", "<|im_end|>"]
    assert pieces_of(tokenizer, "a<|im_end|>", parse_special=False) == [*"a<|im_end|>"]
    assert tokenizer.decode(tokenizer.stop_ids) == ""
