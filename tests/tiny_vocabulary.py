"""Metadata of small vocabularies: what a model file's header would say."""

from coordinator.text.tokenizer import SPACE_MARK, Tokenizer, byte_of_character

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PATH = "tiny.gguf"


def spelled(text: str) -> str:
    """`text` in the alphabet of byte-level BPE."""
    character = {byte: c for c, byte in byte_of_character().items()}
    return "".join([character[bytes([byte])] for byte in text.encode()])


def byte_pair_metadata(
    words: tuple[str, ...] = (" the", " world", "Hello", "\n\n", "12"),
    special: tuple[tuple[str, int], ...] = (("<|endoftext|>", CONTROL), ("<|im_end|>", CONTROL)),
    **extra: object,
) -> dict[str, object]:
    """All bytes, every beginning of each word with the merge that makes it, then special tokens."""
    tokens = list(byte_of_character())
    merges: list[str] = []
    for word in map(spelled, words):
        for cut in range(1, len(word)):
            if word[: cut + 1] not in tokens:
                tokens.append(word[: cut + 1])
                merges.append(f"{word[:cut]} {word[cut]}")
    types = [NORMAL] * len(tokens) + [type_ for _, type_ in special]
    tokens += [text for text, _ in special]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    return with_keys(metadata, extra)


def sentence_piece_metadata(
    pieces: tuple[tuple[str, float], ...] = (("▁a", -1.0), ("ab", -2.0), ("▁ab", -3.0)),
    **extra: object,
) -> dict[str, object]:
    """The three usual special tokens, all bytes, single characters and the scored `pieces`."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    single = sorted({c for text, _ in pieces for c in text} | {SPACE_MARK})
    scores = [0.0] * len(tokens) + [-1000.0 - index for index in range(len(single))]
    tokens += single
    for text, score in pieces:
        tokens.append(text)
        scores.append(score)
    types += [NORMAL] * (len(tokens) - len(types))
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    }
    return with_keys(metadata, extra)


def with_keys(metadata: dict[str, object], extra: dict[str, object]) -> dict[str, object]:
    """`metadata` with tokenizer keys replaced, or dropped where the value is None."""
    changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return {key: value for key, value in changed.items() if value is not None}


def pieces_of(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    """The tokens of `text` as they stand in the vocabulary."""
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return [tokenizer.token_text(token_id) for token_id in ids]
