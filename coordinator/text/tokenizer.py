"""Text to token ids and back, built from the vocabulary in a model file.

Two kinds: byte-level BPE (`gpt2` in the file) with the pre-tokenizer that the file names, and
SentencePiece-style BPE (`llama`) with scores, byte tokens and U+2581 for the space. The merging is
done by the `tokenizers` library; cutting out special tokens is done here, since whether they may be
parsed differs from call to call.

Loaded in one process only: a vocabulary of 150,000 tokens costs some 60 MiB. Knows nothing of chat
templates. The metadata are not kept, so the caller may drop its own large arrays.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Merger

from coordinator.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from coordinator.text.special_tokens import split_special
from coordinator.text.vocabulary import TokenType, Vocabulary, ids_of_types, read_vocabulary
from io_worker.gguf_header import ModelFormatError, escaped

MODELS = ("gpt2", "llama")
# 500,000 tokens of prose, more than any context here. The worst text (a token per byte) takes 1 to
# 4 seconds and 250 MiB per MiB; a service should refuse long before, by the context it has.
MAX_TEXT_BYTES = 2 << 20
SPACE_MARK = "\u2581"

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_SILENT = bytes([TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED])
_MERGED = bytes([TokenType.UNDEFINED, TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED])


class TokenizerError(Exception):
    """The file asks for a tokenizer that is not known here, or a text is too long."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between the two kinds of vocabulary."""

    merger: Merger
    bytes_of_normal: Callable[[str], bytes]
    mark_spaces: bool
    space_prefix: bool
    add_bos: bool  # where the file does not say it


class Tokenizer:
    """Encodes and decodes; made by `build_tokenizer` and not changed afterwards.

    `add_space_prefix`: `encode` puts a space before the text, so `decode(encode(text))` has one
    more. `warning` is a line for the user, or None.
    """

    __slots__ = (
        "_kind",
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
        "warning",
    )

    def __init__(self, vocabulary: Vocabulary, kind: _Kind, warning: str | None) -> None:
        self._kind = kind
        self._types = vocabulary.types
        self._special_parsed = ids_of_types(vocabulary, _SPECIAL)
        self._special_always = ids_of_types(vocabulary, (TokenType.USER_DEFINED,))
        self.vocabulary_size = len(vocabulary.types)
        self.stop_ids = vocabulary.stop_ids
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        add_bos = kind.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = bool(vocabulary.add_eos) and self.eos_id is not None
        self.add_space_prefix = kind.space_prefix
        self.warning = warning

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`; a lone surrogate counts as U+FFFD.

        `add_special` puts BOS and EOS around it where the model wants them. With `parse_special`
        the text of a control token stands for that token; without, it is taken literally. Tokens
        of type user-defined are always parsed, as in llama.cpp. Raises `TokenizerError` beyond
        `MAX_TEXT_BYTES`.
        """
        text = _checked_text(text)
        special = self._special_parsed if parse_special else self._special_always
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = True
        for fragment in split_special(text, special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._encode_fragment(fragment, after_special))
            after_special = isinstance(fragment, int)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode_fragment(self, text: str, after_special: bool) -> list[int]:
        if self.add_space_prefix and after_special:
            text = " " + text
        if self._kind.mark_spaces:
            text = text.replace(" ", SPACE_MARK)
        return self._kind.merger.encode(text, add_special_tokens=False).ids

    def token_text(self, token_id: int) -> str:
        """The token as it stands in the vocabulary, control tokens too: for showing.

        Raises IndexError for an id that is none.
        """
        if not 0 <= token_id < self.vocabulary_size:
            raise IndexError(f"token {token_id}: expected an id below {self.vocabulary_size}")
        text = self._kind.merger.id_to_token(token_id)
        assert text is not None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token prints; control, unknown and unused tokens print nothing.

        Raises IndexError for an id that is none.
        """
        text = self.token_text(token_id)
        token_type = self._types[token_id]
        if token_type in _SILENT:
            return b""
        if token_type == TokenType.BYTE:
            return bytes.fromhex(text[3:5])
        if token_type == TokenType.USER_DEFINED:
            return text.encode()
        return self._kind.bytes_of_normal(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` print; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def build_tokenizer(metadata: Mapping[str, object], path: str) -> Tokenizer:
    """The tokenizer of a model file.

    Raises `ModelFormatError` for a vocabulary that is not well formed and `TokenizerError` for a
    kind of tokenizer or a pre-tokenizer that is not known. `path` is for messages only.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise _unknown(path, "tokenizer.ggml.model", model, MODELS)
    if model == "llama":
        vocabulary = read_vocabulary(metadata, path, _LLAMA_IDS)
        return Tokenizer(vocabulary, _sentence_piece(vocabulary, path), None)
    pre = metadata.get("tokenizer.ggml.pre")
    row = PRE_TOKENIZERS.get("default" if pre is None else str(pre))
    if row is None:
        raise _unknown(path, "tokenizer.ggml.pre", pre, sorted(PRE_TOKENIZERS))
    warning = None
    if pre is None:
        warning = (
            f"{escaped(path)}: tokenizer.ggml.pre is missing, words are cut by the default rule; "
            "answers may be worse, convert the model again"
        )
    vocabulary = read_vocabulary(metadata, path, {})
    return Tokenizer(vocabulary, _byte_level(vocabulary, row, path), warning)


# What a `llama` vocabulary means where the file is silent (llama.cpp, src/llama-vocab.cpp).
_LLAMA_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _unknown(path: str, field: str, found: object, known: Iterable[str]) -> TokenizerError:
    return TokenizerError(
        f"{escaped(path)}: {field}: expected one of {', '.join(known)}; found {found!r:.80}; "
        "text cannot be made into tokens for this model"
    )


def _byte_level(vocabulary: Vocabulary, row: PreTokenizer, path: str) -> _Kind:
    if not vocabulary.merges:
        raise ModelFormatError(path, "tokenizer.ggml.merges", "expected merges, found none")
    merger = Merger(models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=row.ignore_merges))
    merger.pre_tokenizer = word_cutter(row)
    byte_of = byte_of_character()

    def bytes_of_normal(text: str) -> bytes:
        return b"".join([byte_of.get(c) or c.encode() for c in text])

    return _Kind(merger, bytes_of_normal, False, False, row.add_bos)


def word_cutter(row: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Runs the patterns of `row`; the words come out in the byte-level alphabet."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, last])


def _sentence_piece(vocabulary: Vocabulary, path: str) -> _Kind:
    if not vocabulary.scores:
        raise ModelFormatError(path, "tokenizer.ggml.scores", "expected scores, found none")
    unknown = None
    if vocabulary.unknown_id is not None:
        unknown = next(text for text, id_ in vocabulary.ids.items() if id_ == vocabulary.unknown_id)
    merger = Merger(
        models.BPE(
            vocabulary.ids,
            merges_of_scores(vocabulary),
            unk_token=unknown,
            fuse_unk=False,
            byte_fallback=True,
        )
    )
    space_prefix = vocabulary.add_space_prefix is not False
    return _Kind(
        merger, lambda text: text.replace(SPACE_MARK, " ").encode(), True, space_prefix, True
    )


def merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that a vocabulary with scores allows, best score first.

    SentencePiece merges the neighbours whose union has the best score, the leftmost first. Each way
    to cut a token into two tokens is therefore a merge with the rank of the token's score.
    """
    types, scores = vocabulary.types, vocabulary.scores
    ids = {text: id_ for text, id_ in vocabulary.ids.items() if types[id_] in _MERGED}
    ranked = [
        (-scores[id_], id_, left, right)
        for text, id_ in ids.items()
        for cut in range(1, len(text))
        if (left := text[:cut]) in ids and (right := text[cut:]) in ids
    ]
    ranked.sort(key=itemgetter(0, 1))
    return [(left, right) for _, _, left, right in ranked]


def _checked_text(text: str) -> str:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:  # from an argument or file that is not UTF-8
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        n_bytes = len(text.encode())
    if n_bytes > MAX_TEXT_BYTES:
        raise TokenizerError(f"text: expected at most {MAX_TEXT_BYTES} bytes, found {n_bytes}")
    return text


def byte_of_character() -> dict[str, bytes]:
    """The alphabet of byte-level BPE: each byte as one printable character.

    Printable Latin-1 stands for itself, the 68 other bytes are U+0100 and up, in order.
    Source: openai/gpt-2 src/encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}
