"""How text is cut into words before byte pairs are merged: one row per ``tokenizer.ggml.pre``.

A row names the patterns, in the order in which they cut, and where they are published. Each pattern
isolates its matches; what lies between matches stays a word of its own. The next pattern cuts
inside these words only. The syntax is that of Oniguruma, which `tokenizers` uses.

This module does not know vocabularies and does not run the patterns. A name that is not in the
table is refused by `tokenizer.build_tokenizer`: a wrong pattern gives plausible but worse answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns of one pre-tokenizer and the defaults that come with it."""

    patterns: tuple[str, ...]
    source: str  # repository and file in which the patterns are published
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say it


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": PreTokenizer((_GPT_2,), "openai/gpt-2 src/encoder.py"),
        "olmo": PreTokenizer((_GPT_2,), "EleutherAI/gpt-neox-20b tokenizer.json (ByteLevel)"),
        "qwen2": PreTokenizer((_QWEN_2,), "Qwen/Qwen2-7B tokenizer.json"),
    }
)
