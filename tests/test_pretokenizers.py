"""The words of each pre-tokenizer against pipelines of `tokenizers` as the models publish them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabulary import spelled
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from coordinator.text.pretokenizers import PRE_TOKENIZERS
from coordinator.text.tokenizer import word_cutter


def cut(*patterns: str) -> PreTokenizer:
    """Each pattern isolates its matches, then bytes become characters."""
    steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT_2 = ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CJK = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK_CODER = Sequence(
    [
        Split(Regex("[\r\n]"), "isolated"),
        Split(Regex(r"\s?\p{L}+"), "isolated"),
        Split(Regex(r"\s?\p{P}+"), "isolated"),
        Split(Regex(CJK), "isolated"),
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
# Letters with case are \p{Lu}\p{Ll}\p{Lt} in the texts below, which keep to older characters.
DEEPSEEK_LLM = Sequence(
    [
        Split(Regex("[\r\n]"), "isolated"),
        Split(Regex(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"), "isolated"),
        Split(Regex(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"), "isolated"),
        Split(Regex(r"\s+$"), "isolated"),
        Split(Regex(CJK), "isolated"),
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
DEFAULT = cut(
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)

PUBLISHED = {
    "default": DEFAULT,
    "gpt-2": GPT_2,
    "olmo": GPT_2,
    "gigachat": GPT_2,
    "minerva": Sequence([Digits(individual_digits=True), GPT_2]),
    "minerva-7b": Sequence([Digits(individual_digits=True), GPT_2]),
    "refact": Sequence([Digits(individual_digits=True), GPT_2]),
    "qwen2": cut(QWEN_2),
    "deepseek-r1-qwen": cut(QWEN_2),
    "megrez": cut(QWEN_2),
    "grok-2": cut(QWEN_2),
    "solar-open": cut(QWEN_2),
    "hunyuan": cut(QWEN_2),
    "qwen35": cut(QWEN_35),
    "llama-bpe": cut(LLAMA_3),
    "llama-v3": cut(LLAMA_3),
    "llama3": cut(LLAMA_3),
    "lfm2": cut(LLAMA_3),
    "dbrx": cut(LLAMA_3),
    "smaug-bpe": cut(LLAMA_3),
    "glm4": cut(LLAMA_3),
    "chatglm-bpe": cut(LLAMA_3),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": cut(*DEEPSEEK_V3),
    "hunyuan-dense": cut(*DEEPSEEK_V3),
    "joyai-llm": cut(*DEEPSEEK_V3),
    "gpt-4o": cut(O200K),
    "llama4": cut(O200K),
    "minimax-m2": cut(O200K),
    "tekken": cut(TEKKEN),
    "kimi-k2": cut(KIMI),
    "bailingmoe": cut(BAILING),
    "bailingmoe2": cut(BAILING),
    "llada-moe": cut(BAILING),
    "seed-coder": cut(SEED),
}


OURS = {name: word_cutter(row) for name, row in PRE_TOKENIZERS.items()}


def words(cutter: PreTokenizer, text: str) -> list[str]:
    """The words of `text`, each in the alphabet of byte-level BPE."""
    return [word for word, _ in cutter.pre_tokenize_str(text)]


def test_every_name_has_a_published_rule() -> None:
    assert PUBLISHED.keys() == PRE_TOKENIZERS.keys()


# One text that tells the families apart: contractions in capitals, digits, a change of case, an
# accent as a mark of its own, spaces after line ends, punctuation before one, Chinese with kana.
TELLING = "I'VE 12345 aBc cafe\u0301s\n\n  x!=\r\n(a) 日本の中文"
TELLING_WORDS = {
    "default": "I|'|VE| |123|45| aBc| cafe|\u0301|s|\n\n | x|!=|\r\n|(|a|)| 日本の中文",
    "gpt-2": "I|'|VE| 12345| aBc| cafe|\u0301|s|\n\n | x|!=|\r|\n|(|a|)| 日本の中文",
    "minerva": "I|'|VE| |1|2|3|4|5| aBc| cafe|\u0301|s|\n\n | x|!=|\r|\n|(|a|)| 日本の中文",
    "qwen2": "I|'VE| |1|2|3|4|5| aBc| cafe|\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "qwen35": "I|'VE| |1|2|3|4|5| aBc| cafe\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "llama3": "I|'VE| |123|45| aBc| cafe|\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "deepseek-llm": "I|'|VE| |1|2|3|4|5| aBc| cafe|\u0301|s|\n|\n| | x|!=|\r|\n|(|a|)| |日本の中文",
    "deepseek-coder": (
        "I|'|VE| |1|2|3|4|5| aBc| cafe|\u0301|s|\n|\n| | x|!|=|\r|\n|(|a|)| |日本の中文"
    ),
    "deepseek-v3": "I|'VE| |123|45| aBc| cafe\u0301s|\n\n| | x|!=\r\n|(a|)| |日本の中文",
    "gpt-4o": "I'VE| |123|45| a|Bc| cafe\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "tekken": "I|'VE| |1|2|3|4|5| a|Bc| cafe\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "kimi-k2": "I'VE| |123|45| a|Bc| cafe\u0301s|\n\n| | x|!=\r\n|(a|)| |日本|の|中文",
    "bailingmoe": "I|'VE| |1|2|3|4|5| aBc| cafe|\u0301s|\n\n| | x|!=\r\n|(a|)| 日本の中文",
    "seed-coder": "I|'VE| |1|2|3|4|5| aBc| cafe|\u0301s|\n\n| | x|!=|\r\n|(a|)| 日本の中文",
}


@pytest.mark.parametrize("name", TELLING_WORDS)
def test_words_of_each_family(name: str) -> None:
    assert words(OURS[name], TELLING) == [spelled(word) for word in TELLING_WORDS[name].split("|")]


TEXTS = (
    "",
    " ",
    "\n \n\n \t\t  \r\n x",
    "  leading and trailing  ",
    "it's IT'S it'LL don't 'tis we'Ve '\u017f",
    "3 33 333 3333 33333 3.14 ½ ٣٤",
    "snake_case camelCase HTTPServer __init__(self): /* a//b */",
    "'''```!!!???...---===~~~",
    "Ünïcödé нещо на Български ქართული ไทย देवनागरी e\u0301 \u0301",
    # letters with case, each between letters that have none
    "\u0639ก".join(
        "aµÀøǄʓͰͿΆϷԮՖႠᎠᏸᲐᴀᵫᶚḀἘὝ\u1f7dᾀᾶ\u1fbeῂ\u1fdbῲℂℇℊ\u2126\u212bℹↄⰀⳫⳲꙀꚀꜢꞋꭰﬀﬓＡａ𐐀𐒰𐲀𐳀𑢠𞤀"
    ),
    "日本語とカタカナ 中文，标点。 한국어 \u3000全角",
    "🚀 (normal) 😶\u200d🌫️ ✅\u00a0x\u2028y\x85z",
)
mixed = st.text(alphabet="abcXYZ 's\n\r\t0123.,!/-_(é\u0301Жя日のカ한ก🦙\u00a0\u3000½", max_size=24)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_words_are_the_published_ones(name: str) -> None:
    for text in TEXTS:
        assert words(OURS[name], text) == words(PUBLISHED[name], text)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), mixed)
def test_words_of_any_text_are_the_published_ones(name: str, text: str) -> None:
    assert words(OURS[name], text) == words(PUBLISHED[name], text)


# Quadratic work on 60,000 characters takes 10 seconds and more, linear work some milliseconds.
HOSTILE = {
    "letters": "a" * 60_000,
    "capitals": "A" * 60_000 + "1",
    "digits": "1" * 60_000,
    "newlines": "\n" * 60_000,
    "spaces before a digit": " " * 60_000 + "1",
    "spaces before a letter of no case": " " * 60_000 + "中",
    "newline, then spaces": "\n" + " " * 60_000 + "x",
    "combining marks": "\u0301" * 60_000,
    "apostrophes": "'" * 60_000,
    "slashes": "!" + "/" * 60_000,
}
ROWS = {row.patterns: name for name, row in PRE_TOKENIZERS.items()}


@pytest.mark.parametrize("name", sorted(ROWS.values()))
def test_words_take_linear_time(name: str) -> None:
    for kind, text in HOSTILE.items():
        start = time.process_time()
        OURS[name].pre_tokenize_str(text)
        assert time.process_time() - start < 4, kind
