r"""How text is cut into words before byte pairs are merged: one row per ``tokenizer.ggml.pre``.

A row names the patterns, in the order in which they cut, and where they are published. Each pattern
isolates its matches; what lies between matches stays a word of its own. The next pattern cuts
inside these words only. The syntax is that of Oniguruma, which `tokenizers` uses.

Rules to keep: a pattern is the published one, not an approximation; every pattern takes linear time
on every text, which forbids one that scans ahead from each place of a run and then fails
(`\d{1,3}(?=(?:\d{3})*\b)` of tiny_aya, so that name is missing). A name that is not in the table is
refused by `tokenizer.build_tokenizer`: a wrong pattern gives plausible but worse answers.

This module does not know vocabularies and does not run the patterns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns of one pre-tokenizer and the defaults that come with it."""

    patterns: tuple[str, ...]
    model: str  # the model whose tokenizer the name stands for (Hugging Face)
    source: str  # repository and file where the patterns are published, or quoted from the model
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say it


# The last alternatives, shared by almost all: a run with line ends, then spaces but the last one.
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)
_QWEN_2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN_3_5 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES

# Words that end where small letters turn to capitals: o200k, Tekken and Kimi.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_KIMI_K2 = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)

# Letters with case, as published; ASCII escapes, since some of these characters change when a tool
# normalises the source (U+1F7D to U+03CE), which turns ranges round.
_CASED = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}"
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}"
    r"\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}"
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}"
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"(?<!\s)\s+$",  # published without the look-behind, which cuts alike but takes quadratic time
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)
_DIGITS_GPT_2 = (r"\p{N}", _GPT_2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")

_LLAMA_CPP = "ggml-org/llama.cpp src/llama-vocab.cpp"
_BYTE_LEVEL = "huggingface/tokenizers tokenizers/src/pre_tokenizers/byte_level.rs"
_DIGITS = "huggingface/tokenizers tokenizers/src/pre_tokenizers/digits.rs, byte_level.rs"

_LLAMA_3_ROW = PreTokenizer(
    (_LLAMA_3,),
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/llama3 llama/tokenizer.py",
    ignore_merges=True,
    add_bos=True,
)
_GLM_4_ROW = PreTokenizer((_LLAMA_3,), "THUDM/glm-4-9b-chat", _LLAMA_CPP)
_MINERVA_ROW = PreTokenizer(_DIGITS_GPT_2, "sapienzanlp/Minerva-7B-base-v1.0", _DIGITS)

# Which model a name stands for: ggml-org/llama.cpp convert_hf_to_gguf_update.py.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer(_DEFAULT, "none: files without a name", _LLAMA_CPP),
        "gpt-2": PreTokenizer((_GPT_2,), "openai-community/gpt2", "openai/gpt-2 src/encoder.py"),
        "olmo": PreTokenizer((_GPT_2,), "allenai/OLMo-1.7-7B-hf", _BYTE_LEVEL),
        "gigachat": PreTokenizer((_GPT_2,), "ai-sage/GigaChat-20B-A3B-instruct", _BYTE_LEVEL),
        "minerva": _MINERVA_ROW,
        "minerva-7b": _MINERVA_ROW,
        "refact": PreTokenizer(_DIGITS_GPT_2, "smallcloudai/Refact-1_6-base", _DIGITS),
        "qwen2": PreTokenizer((_QWEN_2,), "Qwen/Qwen1.5-7B", _LLAMA_CPP),
        "deepseek-r1-qwen": PreTokenizer(
            (_QWEN_2,), "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", _LLAMA_CPP
        ),
        "megrez": PreTokenizer((_QWEN_2,), "Infinigence/Megrez-3B-Instruct", _LLAMA_CPP),
        "grok-2": PreTokenizer((_QWEN_2,), "alvarobartt/grok-2-tokenizer", _LLAMA_CPP),
        "solar-open": PreTokenizer((_QWEN_2,), "upstage/Solar-Open-100B", _LLAMA_CPP),
        "hunyuan": PreTokenizer(
            (_QWEN_2,), "tencent/Hunyuan-A13B-Instruct", "the model's tokenization_hy.py"
        ),
        "qwen35": PreTokenizer((_QWEN_3_5,), "Qwen/Qwen3.5-9B-Instruct", _LLAMA_CPP),
        "llama-bpe": _LLAMA_3_ROW,
        "llama-v3": _LLAMA_3_ROW,
        "llama3": _LLAMA_3_ROW,
        "lfm2": PreTokenizer(
            (_LLAMA_3,), "LiquidAI/LFM2-Tokenizer", _LLAMA_CPP, ignore_merges=True, add_bos=True
        ),
        "dbrx": PreTokenizer((_LLAMA_3,), "databricks/dbrx-base", _LLAMA_CPP),
        "smaug-bpe": PreTokenizer((_LLAMA_3,), "abacusai/Smaug-Llama-3-70B-Instruct", _LLAMA_CPP),
        "glm4": _GLM_4_ROW,
        "chatglm-bpe": _GLM_4_ROW,
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, "deepseek-ai/deepseek-llm-7b-base", _LLAMA_CPP),
        "deepseek-coder": PreTokenizer(
            _DEEPSEEK_CODER, "deepseek-ai/deepseek-coder-6.7b-base", _LLAMA_CPP
        ),
        "deepseek-v3": PreTokenizer(_DEEPSEEK_V3, "deepseek-ai/DeepSeek-V3", _LLAMA_CPP),
        "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3, "tencent/Hunyuan-4B-Instruct", _LLAMA_CPP),
        "joyai-llm": PreTokenizer(_DEEPSEEK_V3, "jdopensource/JoyAI-LLM-Flash", _LLAMA_CPP),
        "gpt-4o": PreTokenizer(
            (_O200K,), "Xenova/gpt-4o", "openai/tiktoken tiktoken_ext/openai_public.py"
        ),
        "llama4": PreTokenizer(
            (_O200K,),
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "meta-llama/llama-models models/llama4/tokenizer.py",
        ),
        "minimax-m2": PreTokenizer((_O200K,), "MiniMaxAI/MiniMax-M2", _LLAMA_CPP),
        "tekken": PreTokenizer(
            (_TEKKEN,),
            "mistralai/Mistral-Nemo-Base-2407",
            _LLAMA_CPP,
            ignore_merges=True,
            add_bos=True,
        ),
        "kimi-k2": PreTokenizer(
            (_KIMI_K2,), "moonshotai/Kimi-K2-Base", "the model's tokenization_kimi.py"
        ),
        "bailingmoe": PreTokenizer((_BAILING,), "inclusionAI/Ling-lite", _LLAMA_CPP),
        "bailingmoe2": PreTokenizer((_BAILING,), "inclusionAI/Ling-mini-base-2.0", _LLAMA_CPP),
        "llada-moe": PreTokenizer((_BAILING,), "inclusionAI/LLaDA-MoE-7B-A1B-Base", _LLAMA_CPP),
        "seed-coder": PreTokenizer((_SEED_CODER,), "ByteDance-Seed/Seed-Coder-8B-Base", _LLAMA_CPP),
    }
)
