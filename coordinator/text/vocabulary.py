"""The tokenizer part of a model file's metadata, checked completely and given names.

Knows the metadata keys and what makes a vocabulary usable. Does not tokenize. What has passed here
may be trusted: equal lengths, ids in range, merges made of known tokens, byte tokens well formed.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from io_worker.gguf_header import ModelFormatError

MAX_TOKENS = 1 << 21  # the largest published vocabulary has 262,144
MAX_TOKEN_CHARACTERS = 1024  # the longest real ones are runs of some hundred spaces
MAX_CHARACTERS = 1 << 24  # of all tokens together; real ones have below 3 million
MAX_MERGES = 1 << 21

_KEY = "tokenizer.ggml."
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

# Texts that end an answer wherever they exist, next to the ids that the file names; the list of
# llama.cpp (src/llama-vocab.cpp). They count as control tokens, since converters mark them in many
# ways and a text from outside must not hold them by accident. The second group are ordinary words
# in some vocabularies, so they count only where the file marks them as special.
_STOP_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<｜end▁of▁sentence｜>",
)
_STOP_TEXTS_IF_SPECIAL = (
    "</s>",
    "<end_of_turn>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<eos>",
    "[e~[",
)


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked vocabulary; a flag is None where the file does not say it."""

    ids: dict[str, int]
    types: bytes  # one `TokenType` per token
    merges: list[tuple[str, str]]  # model gpt2
    scores: Sequence[float]  # model llama
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None


T = TypeVar("T", int, float, str, bool)


class MetadataReader:
    """Typed access to the tokenizer keys of one file."""

    __slots__ = ("metadata", "path")

    def __init__(self, metadata: Mapping[str, object], path: str) -> None:
        self.metadata, self.path = metadata, path

    def error(self, key: str, text: str) -> ModelFormatError:
        return ModelFormatError(self.path, _KEY + key, text)

    def scalar(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None where the file lacks it."""
        value = self.metadata.get(_KEY + key)
        if value is None or type(value) is kind:
            return value
        raise self.error(key, f"expected {kind.__name__}, found {type(value).__name__}")

    def array(self, key: str, kind: type[T]) -> list[T] | None:
        """The array `key`, all of `kind`, or None where the file lacks it."""
        value = self.metadata.get(_KEY + key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(key, f"expected an array, found {type(value).__name__}")
        if not set(map(type, value)) <= {kind}:
            raise self.error(key, f"expected an array of {kind.__name__}")
        return value


def read_vocabulary(
    metadata: Mapping[str, object], path: str, default_ids: Mapping[str, int]
) -> Vocabulary:
    """Check all tokenizer keys of a model file; raises `ModelFormatError`.

    `default_ids` holds special ids for keys that the file lacks; one beyond the vocabulary is void.
    """
    reader = MetadataReader(metadata, path)
    ids = _read_tokens(reader)
    types = _read_types(reader, len(ids))
    _check_byte_tokens(reader, ids, types)
    special = {
        key: _read_special_id(reader, key, len(ids), default_ids.get(key))
        for key in (
            "bos_token_id",
            "eos_token_id",
            "eot_token_id",
            "eom_token_id",
            "unknown_token_id",
        )
    }
    stop_ids = _stop_ids(ids, types)
    ends = [special["eos_token_id"], special["eot_token_id"], special["eom_token_id"]]
    return Vocabulary(
        ids=ids,
        types=bytes([TokenType.CONTROL if n in stop_ids else t for n, t in enumerate(types)]),
        merges=_read_merges(reader, ids),
        scores=_read_scores(reader, len(ids)),
        bos_id=special["bos_token_id"],
        eos_id=special["eos_token_id"],
        unknown_id=special["unknown_token_id"],
        stop_ids=stop_ids | {id_ for id_ in ends if id_ is not None},
        add_bos=reader.scalar("add_bos_token", bool),
        add_eos=reader.scalar("add_eos_token", bool),
        add_space_prefix=reader.scalar("add_space_prefix", bool),
    )


def _read_tokens(reader: MetadataReader) -> dict[str, int]:
    tokens = reader.array("tokens", str)
    if not tokens:
        raise reader.error("tokens", "expected at least one token, found none")
    if len(tokens) > MAX_TOKENS:
        raise reader.error("tokens", f"expected at most {MAX_TOKENS} tokens, found {len(tokens)}")
    # An empty token matches nothing and may occur more than once: give each a text of its own.
    texts = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(tokens)]
    ids = {text: id_ for id_, text in enumerate(texts)}
    if len(ids) != len(texts):
        first = next(id_ for id_, text in enumerate(texts) if ids[text] != id_)
        where = f"tokens {first} and {ids[texts[first]]}"
        raise reader.error("tokens", f"expected each token once, found {texts[first]!r} as {where}")
    longest = max(texts, key=len)
    if len(longest) > MAX_TOKEN_CHARACTERS:
        text = f"expected at most {MAX_TOKEN_CHARACTERS} characters, found {len(longest)}"
        raise reader.error("tokens", f"token {ids[longest]}: {text}")
    total = sum(map(len, texts))
    if total > MAX_CHARACTERS:
        raise reader.error("tokens", f"expected at most {MAX_CHARACTERS} characters, found {total}")
    return ids


def _read_types(reader: MetadataReader, n_tokens: int) -> bytes:
    types = reader.array("token_type", int)
    if types is None:
        return bytes([TokenType.NORMAL]) * n_tokens
    _check_length(reader, "token_type", len(types), n_tokens)
    if min(types) < 0 or max(types) > max(TokenType):
        bad = next(id_ for id_, type_ in enumerate(types) if not 0 <= type_ <= max(TokenType))
        raise reader.error("token_type", f"token {bad}: expected 0..6, found {types[bad]}")
    return bytes(types)


def _read_scores(reader: MetadataReader, n_tokens: int) -> list[float]:
    scores = reader.array("scores", float)
    if scores is None:
        return []
    _check_length(reader, "scores", len(scores), n_tokens)
    for id_, score in enumerate(scores):
        if not math.isfinite(score):
            raise reader.error("scores", f"token {id_}: expected a finite score, found {score}")
    return scores


def _read_merges(reader: MetadataReader, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    texts = reader.array("merges", str) or []
    if len(texts) > MAX_MERGES:
        raise reader.error("merges", f"expected at most {MAX_MERGES} merges, found {len(texts)}")
    merges: list[tuple[str, str]] = []
    for index, text in enumerate(texts):
        # from 1: the first part may itself begin with a space, and is never empty
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or not right:
            raise reader.error("merges", f"merge {index}: expected two tokens, found {text!r}")
        if left not in ids or right not in ids or left + right not in ids:
            unknown = next(part for part in (left, right, left + right) if part not in ids)
            raise reader.error("merges", f"merge {index}: expected tokens, found {unknown!r}")
        merges.append((left, right))
    return merges


def _check_byte_tokens(reader: MetadataReader, ids: Mapping[str, int], types: bytes) -> None:
    if TokenType.BYTE not in types:
        return
    for text, id_ in ids.items():
        if types[id_] == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(text):
            raise reader.error("tokens", f"token {id_}: expected <0x00> to <0xFF>, found {text!r}")


def _read_special_id(
    reader: MetadataReader, key: str, n_tokens: int, default: int | None
) -> int | None:
    id_ = reader.scalar(key, int)
    if id_ is None:
        return default if default is not None and default < n_tokens else None
    if not 0 <= id_ < n_tokens:
        raise reader.error(key, f"expected an id below {n_tokens}, found {id_}")
    return id_


def _check_length(reader: MetadataReader, key: str, found: int, n_tokens: int) -> None:
    if found != n_tokens:
        raise reader.error(key, f"expected {n_tokens} entries as there are tokens, found {found}")


def _stop_ids(ids: Mapping[str, int], types: bytes) -> frozenset[int]:
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    found = {ids[text] for text in _STOP_TEXTS if text in ids}
    found |= {
        ids[text] for text in _STOP_TEXTS_IF_SPECIAL if text in ids and types[ids[text]] in special
    }
    # Where <|return|> and <|call|> end an answer, <|end|> only ends a part of it (gpt-oss).
    if "<|return|>" in ids and "<|call|>" in ids and "<|end|>" in ids:
        found.discard(ids["<|end|>"])
    return frozenset(found)


def ids_of_types(vocabulary: Vocabulary, types: Iterable[TokenType]) -> dict[str, int]:
    """Text to id of all tokens of these types, longest text (in bytes) first."""
    wanted = bytes(types)
    found = [item for item in vocabulary.ids.items() if vocabulary.types[item[1]] in wanted]
    return dict(sorted(found, key=lambda item: (-len(item[0].encode()), item[1])))
