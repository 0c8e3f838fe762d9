"""Tiny complete models for tests: `tiny_model` writes `olmoe` and `qwen3moe` files.

Weights are random, the vocabulary is byte-level BPE with few words, the keys are those that real
files have. The same arguments give the same bytes. Bad files are made with `gguf_bytes`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U16, U32, array, entry, gguf, tensor_entry
from random_weights import random_matrix

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
_WORDS = """
Ġthe Ġand Ġof Ġto Ġa Ġin Ġthat Ġis Ġwas Ġhe Ġfor Ġit Ġwith Ġas Ġhis Ġon Ġbe Ġat Ġby Ġnot
Ġthis Ġhad Ġare Ġbut Ġfrom Ġor Ġhave Ġan Ġthey Ġwhich Ġone Ġyou Ġwere Ġher Ġall Ġshe Ġthere
Ġwould Ġtheir Ġwe Ġhim Ġbeen Ġhas Ġwhen Ġwho Ġwill Ġmore Ġno Ġif Ġout Ġso Ġsaid Ġwhat Ġup
Ġits Ġabout Ġinto Ġthan Ġthem Ġcan Ġonly Ġother Ġnew Ġsome Ġcould Ġtime Ġthese Ġtwo Ġmay
ing ed er es ly tion ment able The And It In Once Hello Ġworld
"""


def byte_letters() -> list[str]:
    """The letter that stands for each byte 0..255 in a byte-level vocabulary (GPT-2's mapping)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges: special tokens, all bytes, words built letter by letter."""
    tokens = [*_SPECIAL, *byte_letters()]
    merges: dict[str, None] = {}
    for word in _WORDS.split():
        for cut in range(1, len(word)):
            merges[f"{word[:cut]} {word[cut]}"] = None
    tokens += dict.fromkeys([merge.replace(" ", "") for merge in merges])
    return tokens, [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)), list(merges)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What `tiny_model` writes. Types are ggml names; None follows from the other fields."""

    arch: str = "olmoe"  # or "qwen3moe"
    quantisation: str = "Q8_0"  # of all matrices; "Q4_K_M" mixes Q4_K and Q6_K as real files do
    expert_types: tuple[tuple[str, str, str], ...] = ()  # gate, up, down of each layer, when given
    seed: int = 0
    n_layers: int = 2
    n_experts: int = 8
    n_active: int = 2
    width: int | None = None  # 256 where a type needs whole blocks of 256, else 64
    expert_width: int | None = None  # the width
    n_heads: int = 4
    n_kv_heads: int | None = None  # olmoe: all heads, qwen3moe: half of them
    head_width: int | None = None  # olmoe: width / heads, qwen3moe: twice that, and a key says so
    context_length: int = 512
    tied: bool = False  # no output.weight
    expert_width_key: bool = True  # qwen3moe.expert_feed_forward_length
    rope_base_key: bool = True
    alignment: int | None = None  # None writes no key, which means 32
    version: int = 3
    split: int = 1  # number of files; from 3 on gate, up and down of a layer lie in different ones
    chat_template: str | None = CHAT_TEMPLATE
    entries: Mapping[str, bytes | None] = field(default_factory=dict)  # replaced, added; None: gone
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # other shapes, no new data
    without: tuple[str, ...] = ()  # tensors left out

    def types(self, layer: int) -> dict[str, str]:
        """The type of each matrix of a layer by its short name."""
        base, better = self.quantisation, self.quantisation
        if base == "Q4_K_M":
            base, better = "Q4_K", "Q6_K" if layer % 2 else "Q4_K"
        gate, up, down = self.expert_types[layer] if self.expert_types else (base, base, better)
        attention = {"attn_q": base, "attn_k": base, "attn_v": better, "attn_output": base}
        return {**attention, "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a model, with nothing left to follow from anything else."""

    width: int
    expert_width: int
    head_width: int
    n_kv_heads: int


def _sizes(model: TinyModel) -> _Sizes:
    kinds = {kind for layer in range(model.n_layers) for kind in model.types(layer).values()}
    widest = max([GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] for kind in kinds])
    width = model.width or (256 if widest == 256 else 64)
    is_olmoe = model.arch == "olmoe"
    return _Sizes(
        width=width,
        expert_width=model.expert_width or width,
        head_width=model.head_width or width // model.n_heads * (1 if is_olmoe else 2),
        n_kv_heads=model.n_kv_heads or (model.n_heads if is_olmoe else model.n_heads // 2),
    )


def tiny_model(path: Path, **options: Any) -> Path:
    """Write a model with the fields of `TinyModel` as `options`; returns the (first) file.

    With `split`, `NAME.gguf` becomes `NAME-00001-of-0000N.gguf` and so on.
    """
    model = TinyModel(**options)
    tensors = _tensors(model)
    names = [path]
    if model.split > 1:
        names = [
            path.with_name(f"{path.stem}-{part + 1:05}-of-{model.split:05}.gguf")
            for part in range(model.split)
        ]
    for part, name in enumerate(names):
        entries = _metadata(model) if part == 0 else []
        if part and model.alignment:
            entries.append(entry("general.alignment", U32, model.alignment))
        if model.split > 1:
            entries.append(entry("split.no", U16, part))
            entries.append(entry("split.count", U16, model.split))
            entries.append(entry("split.tensors.count", I32, len(tensors)))
        name.write_bytes(_file(model, entries, tensors[part :: model.split]))
    return names[0]


_Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, shape innermost first, type, data


def _file(model: TinyModel, entries: list[bytes], tensors: list[_Tensor]) -> bytes:
    alignment = model.alignment or 32
    infos, data = [], bytearray()
    for name, shape, kind, raw in tensors:
        infos.append(tensor_entry(name, shape, kind, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    return gguf(entries, infos, bytes(data), version=model.version, alignment=alignment)


def _metadata(model: TinyModel) -> list[bytes]:
    """The entries by key, `model.entries` applied."""
    tokens, kinds, merges = vocabulary()
    arch, sizes = model.arch, _sizes(model)
    is_olmoe = arch == "olmoe"
    file_type = LlamaFileType.__members__.get(f"MOSTLY_{model.quantisation}", LlamaFileType.GUESSED)
    counts: dict[str, int] = {
        "context_length": model.context_length,
        "embedding_length": sizes.width,
        "block_count": model.n_layers,
        "feed_forward_length": sizes.expert_width * (1 if is_olmoe else model.n_active),
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": sizes.n_kv_heads,
        "expert_count": model.n_experts,
        "expert_used_count": model.n_active,
    }
    if not is_olmoe:
        counts["attention.key_length"] = counts["attention.value_length"] = sizes.head_width
        if model.expert_width_key:
            counts["expert_feed_forward_length"] = sizes.expert_width
    values: dict[str, tuple[int, object]] = {
        "general.architecture": (STRING, arch),
        "general.type": (STRING, "model"),
        "general.name": (STRING, f"tiny-{arch}"),
        **{f"{arch}.{key}": (U32, count) for key, count in counts.items()},
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, 1e-5 if is_olmoe else 1e-6),
        "general.file_type": (U32, int(file_type)),
        "general.quantization_version": (U32, 2),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, array(STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, array(I32, kinds)),
        "tokenizer.ggml.merges": (ARRAY, array(STRING, merges)),
        "tokenizer.ggml.bos_token_id": (U32, tokens.index("<|endoftext|>")),
        "tokenizer.ggml.eos_token_id": (U32, tokens.index("<|endoftext|>")),
        "tokenizer.ggml.padding_token_id": (U32, tokens.index("<|pad|>")),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }
    if model.rope_base_key:
        values[f"{arch}.rope.freq_base"] = (F32, 1e4 if is_olmoe else 1e6)
    if model.alignment:
        values["general.alignment"] = (U32, model.alignment)
    if model.chat_template is not None:
        values["tokenizer.chat_template"] = (STRING, model.chat_template)
    entries = {key: entry(key, kind, content) for key, (kind, content) in values.items()}
    return [raw for raw in {**entries, **model.entries}.values() if raw is not None]


def _tensors(model: TinyModel) -> list[_Tensor]:
    """All tensors in the order of real files; gate, up and down of a layer are neighbours."""
    rng = np.random.default_rng(model.seed)
    tensors: list[_Tensor] = []

    def matrix(name: str, type_name: str, *shape: int, gain: float = 1.0) -> None:
        n_cols, n_rows = shape[0], math.prod(shape[1:])
        rows = random_matrix(type_name, n_rows, n_cols, gain / math.sqrt(n_cols), rng)
        kind = int(GGMLQuantizationType[type_name])
        tensors.append((f"{name}.weight", shape, kind, rows.tobytes()))

    def norm(name: str, size: int) -> None:
        scales = 1 + rng.standard_normal(size, np.float32) / np.float32(10)
        tensors.append((f"{name}.weight", (size,), 0, scales.tobytes()))

    sizes = _sizes(model)
    width, expert_width, experts = sizes.width, sizes.expert_width, model.n_experts
    n_vocabulary = len(vocabulary()[0])
    queries, keys = model.n_heads * sizes.head_width, sizes.n_kv_heads * sizes.head_width
    whole = model.arch == "olmoe"  # q and k are normalised over all heads at once
    base = model.types(0)["attn_q"]
    matrix("token_embd", base, width, n_vocabulary, gain=0.5 * math.sqrt(width))
    for layer in range(model.n_layers):
        block, types = f"blk.{layer}.", model.types(layer)
        norm(block + "attn_norm", width)
        norm(block + "attn_q_norm", queries if whole else sizes.head_width)
        norm(block + "attn_k_norm", keys if whole else sizes.head_width)
        for name, n_cols, n_rows in (
            ("attn_q", width, queries),
            ("attn_k", width, keys),
            ("attn_v", width, keys),
            ("attn_output", queries, width),
        ):
            matrix(block + name, types[name], n_cols, n_rows)
        norm(block + "ffn_norm", width)
        matrix(block + "ffn_gate_inp", "F32", width, experts, gain=2.0)  # so that routing differs
        for name, n_cols, n_rows in (
            ("ffn_gate_exps", width, expert_width),
            ("ffn_up_exps", width, expert_width),
            ("ffn_down_exps", expert_width, width),
        ):
            matrix(block + name, types[name], n_cols, n_rows, experts)
    norm("output_norm", width)
    if not model.tied:
        matrix("output", "Q6_K" if model.quantisation == "Q4_K_M" else base, width, n_vocabulary)
    return [
        (name, model.shapes.get(name, shape), kind, raw)
        for name, shape, kind, raw in tensors
        if name not in model.without
    ]
