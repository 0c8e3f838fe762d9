"""Text to token ids and back, built from the vocabulary in a model file.

The merging is done by the `tokenizers` library; cutting out special tokens is done here, since
whether they may be parsed differs from call to call. Loaded in one process only: a vocabulary of
150,000 tokens costs some 100 MiB. Knows nothing of chat templates.
"""

import re
from collections.abc import Iterable, Mapping

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as MergeTokenizer

from coordinator.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from coordinator.vocabulary import TokenType, Vocabulary, ids_of_types, read_vocabulary
from io_worker.gguf_header import ModelFormatError

MODELS = ("gpt2", "llama")
# Far beyond any context, and small enough that no text costs more than some seconds.
MAX_TEXT_BYTES = 8 << 20

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


class TokenizerError(Exception):
    """The file asks for a tokenizer that is not known here, or a text is too long."""


class Tokenizer:
    """Encodes and decodes; immutable after `build_tokenizer`."""

    __slots__ = (
        "_byte_of_character",
        "_merger",
        "_special_always",
        "_special_parsed",
        "_types",
        "add_bos",
        "add_eos",
        "add_space_prefix",
        "bos_id",
        "eos_id",
        "stop_ids",
        "vocabulary_size",
    )

    def __init__(self, vocabulary: Vocabulary, merger: MergeTokenizer, row: PreTokenizer) -> None:
        self._merger = merger
        self._types = vocabulary.types
        self._byte_of_character = _byte_of_character()
        self._special_parsed = ids_of_types(vocabulary, _SPECIAL)
        self._special_always = ids_of_types(vocabulary, (TokenType.USER_DEFINED,))
        self.vocabulary_size = len(vocabulary.types)
        self.stop_ids = vocabulary.stop_ids
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        add_bos = row.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = bool(vocabulary.add_eos) and self.eos_id is not None
        self.add_space_prefix = False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        `add_special` puts BOS and EOS around it where the model wants them. With `parse_special`
        the text of a control token stands for that token; without, it is taken literally. Tokens
        of type user-defined are always parsed, as in llama.cpp. Raises `TokenizerError` beyond
        `MAX_TEXT_BYTES`.
        """
        text = _SURROGATE.sub("\ufffd", text)
        n_bytes = len(text.encode())
        if n_bytes > MAX_TEXT_BYTES:
            raise TokenizerError(f"text: expected at most {MAX_TEXT_BYTES} bytes, found {n_bytes}")
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        special = self._special_parsed if parse_special else self._special_always
        for fragment in split_special(text, special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._merger.encode(fragment, add_special_tokens=False).ids)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def token_text(self, token_id: int) -> str:
        """The token as it stands in the vocabulary, control tokens too: for showing."""
        if not 0 <= token_id < self.vocabulary_size:
            raise IndexError(f"token {token_id}: expected an id below {self.vocabulary_size}")
        return self._merger.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token prints; control, unknown and unused tokens print nothing."""
        text = self.token_text(token_id)
        token_type = self._types[token_id]
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED):
            return b""
        if token_type == TokenType.USER_DEFINED:
            return text.encode()
        return b"".join([self._byte_of_character.get(c) or c.encode() for c in text])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def build_tokenizer(metadata: Mapping[str, object], path: str) -> Tokenizer:
    """The tokenizer of a model file.

    Raises `ModelFormatError` for a vocabulary that is not well formed and `TokenizerError` for a
    kind of tokenizer or pre-tokenizer that is not known. `path` is for messages only.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise _unknown(path, "tokenizer.ggml.model", model, MODELS)
    vocabulary = read_vocabulary(metadata, path)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    row = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if row is None:
        raise _unknown(path, "tokenizer.ggml.pre", pre, sorted(PRE_TOKENIZERS))
    if not vocabulary.merges:
        raise ModelFormatError(path, "tokenizer.ggml.merges", "expected merges, found none")
    return Tokenizer(vocabulary, _byte_pair_merger(vocabulary, row), row)


def _unknown(path: str, field: str, found: object, known: Iterable[str]) -> TokenizerError:
    return TokenizerError(
        f"{path}: {field}: expected one of {', '.join(known)}; found {str(found)!r:.80}; "
        "a file with another tokenizer cannot be run"
    )


def _byte_pair_merger(vocabulary: Vocabulary, row: PreTokenizer) -> MergeTokenizer:
    merger = MergeTokenizer(
        models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=row.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns]
    merger.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return merger


def split_special(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Cut `text` at the special tokens of `special`, which are tried in its order.

    Longer tokens come first and are found in the whole text before shorter ones, as in llama.cpp.
    """
    fragments: list[str | int] = [text] if text else []
    for token, token_id in special.items():
        if token not in text:
            continue
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            for index, part in enumerate(fragment.split(token)):
                if index:
                    cut.append(token_id)
                if part:
                    cut.append(part)
        fragments = cut
    return fragments


def _byte_of_character() -> dict[str, bytes]:
    """The alphabet of byte-level BPE: each byte as one printable character.

    Printable Latin-1 stands for itself, the 68 other bytes are U+0100 and up, in order.
    Source: openai/gpt-2 src/encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}
