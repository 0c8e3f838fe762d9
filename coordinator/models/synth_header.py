"""The header of a synthetic model: keys, a small made-up vocabulary, and where each tensor lies.

Byte layout (GGUF version 3, all little endian)::

    "GGUF" u32 version, u64 tensors, u64 keys
    each key: string, u32 type, value          string: u64 bytes, UTF-8
    each tensor: string, u32 dimensions, u64 each (innermost first), u32 type, u64 offset
    zeros up to the alignment, then the tensors' data, each at a multiple of it
"""

import string
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from io_worker.ggml_types import GgmlType

ALIGNMENT = 32  # what a file without the key general.alignment has
U32, I32, F32, STRING, ARRAY = 4, 5, 6, 8, 9
NORMAL_TOKEN, CONTROL_TOKEN, UNUSED_TOKEN = 1, 3, 5
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class SynthTensor:
    """One tensor to write; `shape` is innermost first, `deviation` None means ones."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    deviation: float | None

    @property
    def n_elements(self) -> int:
        """Product of the shape."""
        n = 1
        for dimension in self.shape:
            n *= dimension
        return n

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, without the padding after it."""
        return self.n_elements // self.kind.block_elements * self.kind.block_bytes


def header_bytes(keys: Mapping[str, int | float | str], entries: bytes, n_entries: int,
                 tensors: Sequence[SynthTensor]) -> bytes:  # fmt: skip
    """The whole header, padded to the alignment. `entries` are `n_entries` encoded keys more."""
    infos, offset = bytearray(), 0
    for tensor in tensors:
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        infos += _text(tensor.name) + dimensions + struct.pack("<IQ", tensor.kind.id, offset)
        offset += padded(tensor.n_bytes)
    start = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys) + n_entries)
    scalars = b"".join(_text(key) + _scalar(value) for key, value in keys.items())
    whole = start + scalars + entries + bytes(infos)
    return whole + bytes(padded(len(whole)) - len(whole))


def padded(n_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def vocabulary_entries(n_tokens: int, pre_tokenizer: str) -> tuple[bytes, int]:
    """Encoded keys of a byte-level BPE vocabulary of exactly `n_tokens`, and their number.

    The end of text is token 0, then all bytes, then pairs of small letters, of which a few are also
    preceded by a space; the rest is unused.
    """
    tokens = [END_OF_TEXT, *_byte_letters()]
    kinds = [CONTROL_TOKEN] + [NORMAL_TOKEN] * 256
    merges = [f"{a} {b}" for a in "Ġ" + string.ascii_lowercase for b in string.ascii_lowercase]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds += [NORMAL_TOKEN] * len(merges)
    n_unused = n_tokens - len(tokens)
    assert n_unused >= 0, n_tokens
    tokens += [f"[unused{number}]" for number in range(n_unused)]
    kinds += [UNUSED_TOKEN] * n_unused
    entries = [
        _text("tokenizer.ggml.model") + _scalar("gpt2"),
        _text("tokenizer.ggml.pre") + _scalar(pre_tokenizer),
        _text("tokenizer.ggml.tokens") + _array(STRING, n_tokens, b"".join(map(_text, tokens))),
        _text("tokenizer.ggml.token_type")
        + _array(I32, n_tokens, struct.pack(f"<{n_tokens}i", *kinds)),
        _text("tokenizer.ggml.merges") + _array(STRING, len(merges), b"".join(map(_text, merges))),
        _text("tokenizer.ggml.eos_token_id") + _scalar(0),
    ]
    return b"".join(entries), len(entries)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte 0..255, as in GPT-2's vocabulary: printable Latin-1
    characters stand for themselves, the others are moved behind 255, in order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + moved.index(b)) for b in range(256)]


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _scalar(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    return struct.pack("<If", F32, value)


def _array(kind: int, n: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, n) + data
