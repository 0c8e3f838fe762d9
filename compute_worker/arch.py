"""Architectures: the one place where names of GGUF keys and tensors become fields.

`resolve` turns an opened model into a `ModelSpec` and checks everything the forward pass relies on:
numbers within limits, every tensor present, of the right shape and a usable type, and nothing in
the file that this engine would have to ignore. What it accepts is trusted from there on.

An architecture is a row of `ARCHS`. A field of a row names a rule or a function; no other module
asks which architecture it has. This module imports no numpy: the coordinator uses it to plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from compute_worker.model_checks import Keys, Tensors, shown
from io_worker.ggml_types import GGML_TYPES
from io_worker.ggml_types import WEIGHT_TYPES as WEIGHT_TYPE_IDS
from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.model_file import Model
from io_worker.slabs import SlabTable, slab_table

KV_BLOCK_TOKENS = 64  # one block of the KV cache, and the tile of attention
DENSE_ALIGNMENT = 64  # a cache line, and the widest vector load
KV_BYTES_PER_32 = {"f32": 128, "f16": 64, "q8_0": 34}  # q8_0: an f16 scale and 32 int8

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
WEIGHT_TYPES = frozenset([GGML_TYPES[type_id].name for type_id in WEIGHT_TYPE_IDS])


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """What the file does not say. `expert_width_key` may be absent from the file if
    `expert_width_fallback`: then it is feed_forward_length / experts used."""

    name: str
    expert_width_key: str
    expert_width_fallback: bool
    default_rope_base: float  # for files without rope.freq_base
    norm_topk: bool  # whether the weights of the chosen experts are scaled to sum 1
    qk_norm: str  # "whole": one RMS over the vector of all heads; "head": one per head; "none"
    tied_output: bool  # whether output.weight may be absent and token_embd.weight takes its part


ARCHS: Mapping[str, ArchSpec] = {
    "olmoe": ArchSpec(
        name="olmoe",
        expert_width_key="feed_forward_length",
        expert_width_fallback=False,
        default_rope_base=10_000.0,
        norm_topk=False,
        qk_norm="whole",
        tied_output=False,
    ),
    "qwen3moe": ArchSpec(
        name="qwen3moe",
        expert_width_key="expert_feed_forward_length",
        expert_width_fallback=True,
        default_rope_base=1_000_000.0,
        norm_topk=True,
        qk_norm="head",
        tied_output=True,
    ),
}

# Keys that would change the result: each may be absent or hold a value that changes nothing.
NEUTRAL_KEYS: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none", "linear"),  # linear with no factor scales nothing
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The dense tensors of one layer. Shapes in ggml order, innermost (input) dimension first."""

    attn_norm: TensorInfo  # (D)
    q: TensorInfo  # (D, H * head_width)
    k: TensorInfo  # (D, K * head_width)
    v: TensorInfo  # (D, K * head_width)
    attn_output: TensorInfo  # (H * head_width, D)
    q_norm: TensorInfo | None
    k_norm: TensorInfo | None
    ffn_norm: TensorInfo  # (D)
    router: TensorInfo  # (D, E)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checked model: its numbers, where its dense tensors lie, and its expert slabs."""

    arch: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    expert_width: int
    n_experts: int
    n_active: int
    vocabulary_size: int
    context_length: int
    rope_base: float
    rope_width: int  # the first dimensions of each head that are rotated
    rms_epsilon: float
    norm_topk: bool
    qk_norm: str
    token_embedding: TensorInfo
    output: TensorInfo | None  # None: tied to the token embedding
    output_norm: TensorInfo
    layers: tuple[LayerTensors, ...]
    slabs: SlabTable
    n_merges: int = 0  # of the tokenizer: with the tokens, what it costs in memory


class _Numbers(NamedTuple):
    """The fields of `ModelSpec` that come from metadata alone."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    expert_width: int
    n_experts: int
    n_active: int
    context_length: int
    rope_base: float
    rope_width: int
    rms_epsilon: float


def resolve(model: Model) -> ModelSpec:
    """Check a model completely and name its parts; raises `ModelFormatError`."""
    path = model.paths[0]
    found = model.metadata.get("general.architecture")
    row = ARCHS.get(found) if isinstance(found, str) else None
    if row is None:
        text = f"expected one of {', '.join(ARCHS)}, found {shown(found)}"
        raise ModelFormatError(path, "general.architecture", text)
    keys = Keys(path, row.name, model.metadata)
    _refuse_what_changes_results(keys, row)
    numbers = _numbers(keys, row)
    vocabulary_size = _vocabulary_size(keys, model)
    # first of all tensors: it knows other layouts of experts and says what to do about them
    slabs = slab_table(model, range(numbers.n_layers), numbers.n_experts)
    lookup = Tensors(model)
    embedding_shape = (numbers.width, vocabulary_size)
    tied = row.tied_output and "output.weight" not in model.tensors
    spec = ModelSpec(
        arch=row.name,
        vocabulary_size=vocabulary_size,
        norm_topk=row.norm_topk,
        qk_norm=row.qk_norm,
        token_embedding=lookup.find("token_embd.weight", embedding_shape, WEIGHT_TYPES),
        output=None if tied else lookup.find("output.weight", embedding_shape, WEIGHT_TYPES),
        output_norm=lookup.find("output_norm.weight", (numbers.width,), FLOAT_TYPES),
        layers=tuple([_layer(lookup, row, numbers, index) for index in range(numbers.n_layers)]),
        slabs=slabs,
        n_merges=_length(model.metadata.get("tokenizer.ggml.merges")),
        **numbers._asdict(),
    )
    lookup.refuse_rest(f"{row.name} with {numbers.n_layers} layers")
    return spec


def float_tensors(spec: ModelSpec) -> list[TensorInfo]:
    """Dense tensors that are held as float32 whatever their type in the file: norms and routers."""
    tensors = [spec.output_norm]
    for layer in spec.layers:
        optional = (layer.q_norm, layer.k_norm)
        tensors += [layer.attn_norm, layer.ffn_norm, layer.router]
        tensors += [norm for norm in optional if norm is not None]
    return tensors


def matrix_tensors(spec: ModelSpec) -> list[TensorInfo]:
    """Dense tensors that are held as they are in the file: projections and the output head."""
    tensors = [spec.output or spec.token_embedding]
    for layer in spec.layers:
        tensors += [layer.q, layer.k, layer.v, layer.attn_output]
    return tensors


def dense_tensors(spec: ModelSpec) -> list[TensorInfo]:
    """Every tensor that is no expert, in file order. The embedding is among them."""
    tensors = float_tensors(spec) + matrix_tensors(spec)
    if spec.output is not None:
        tensors.append(spec.token_embedding)
    return sorted(tensors, key=lambda info: (info.file, info.offset))


def dense_bytes(spec: ModelSpec) -> int:
    """Memory that the dense weights take. Embedding rows are read on demand unless tied."""
    expanded = [4 * math.prod(info.shape) for info in float_tensors(spec)]
    as_they_are = [info.n_bytes for info in matrix_tensors(spec)]
    return sum(-(-n // DENSE_ALIGNMENT) * DENSE_ALIGNMENT for n in expanded + as_they_are)


def kv_block_bytes(spec: ModelSpec, kind: str) -> int:
    """Bytes of one KV block (64 tokens, all layers). `kind` is a key of `KV_BYTES_PER_32`."""
    n_elements = spec.n_layers * 2 * spec.n_kv_heads * KV_BLOCK_TOKENS * spec.head_width
    return n_elements * KV_BYTES_PER_32[kind] // 32


def _refuse_what_changes_results(keys: Keys, row: ArchSpec) -> None:
    allowed = {**NEUTRAL_KEYS, "expert_weights_norm": (row.norm_topk,)}
    for key, neutral in allowed.items():
        found = keys.get(key)
        if found is not None and found not in neutral:
            choices = " or ".join(str(value) for value in neutral)
            raise keys.error(key, f"{choices} (nothing else is supported)", found)


def _numbers(keys: Keys, row: ArchSpec) -> _Numbers:
    width = keys.integer("embedding_length", 1, 2**20)
    n_heads = keys.integer("attention.head_count", 1, 2**16)
    n_kv_heads = keys.integer("attention.head_count_kv", 1, n_heads, default=n_heads)
    if n_heads % n_kv_heads:
        raise keys.error("attention.head_count_kv", f"a divisor of {n_heads} heads", n_kv_heads)
    even_width = width // n_heads if width % n_heads == 0 else None
    head_width = keys.integer("attention.key_length", 1, 2**16, default=even_width)
    value_width = keys.integer("attention.value_length", 1, 2**16, default=even_width)
    if value_width != head_width:
        raise keys.error("attention.value_length", f"the key length {head_width}", value_width)
    rope_width = keys.integer("rope.dimension_count", 2, head_width, default=head_width)
    if rope_width % 2:
        raise keys.error("rope.dimension_count", "an even number", rope_width)
    n_experts = keys.integer("expert_count", 1, 4096)
    n_active = keys.integer("expert_used_count", 1, n_experts)
    fallback = None
    if row.expert_width_fallback and keys.get(row.expert_width_key) is None:
        fallback = keys.integer("feed_forward_length", n_active, 2**24) // n_active
    return _Numbers(
        n_layers=keys.integer("block_count", 1, 1024),
        width=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_width=head_width,
        expert_width=keys.integer(row.expert_width_key, 1, 2**20, default=fallback),
        n_experts=n_experts,
        n_active=n_active,
        context_length=keys.integer("context_length", 1, 2**30),
        rope_base=keys.real("rope.freq_base", 1.0, 1e12, default=row.default_rope_base),
        rope_width=rope_width,
        rms_epsilon=keys.real("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
    )


def _vocabulary_size(keys: Keys, model: Model) -> int:
    """Tokens of the tokenizer; for a file without one, rows of the embedding."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    embedding = model.tensors.get("token_embd.weight")
    rows = embedding.shape[-1] if embedding is not None else None
    n_tokens = rows if tokens is None else _length(tokens)
    return keys.integer("vocab_size", 1, 2**24) if n_tokens is None else n_tokens


def _length(found: object) -> int:
    return len(found) if isinstance(found, list | tuple) else 0


def _layer(lookup: Tensors, row: ArchSpec, n: _Numbers, layer: int) -> LayerTensors:
    def find(suffix: str, *shape: int, types: frozenset[str] = WEIGHT_TYPES) -> TensorInfo:
        return lookup.find(f"blk.{layer}.{suffix}.weight", shape, types)

    def norm(suffix: str, n_elements: int) -> TensorInfo:
        return find(suffix, n_elements, types=FLOAT_TYPES)

    q_width, kv_width = n.n_heads * n.head_width, n.n_kv_heads * n.head_width
    norm_widths = {"whole": (q_width, kv_width), "head": (n.head_width, n.head_width)}
    widths = norm_widths.get(row.qk_norm)
    find("ffn_gate_exps", n.width, n.expert_width, n.n_experts)
    find("ffn_up_exps", n.width, n.expert_width, n.n_experts)
    find("ffn_down_exps", n.expert_width, n.width, n.n_experts)
    return LayerTensors(
        attn_norm=norm("attn_norm", n.width),
        q=find("attn_q", n.width, q_width),
        k=find("attn_k", n.width, kv_width),
        v=find("attn_v", n.width, kv_width),
        attn_output=find("attn_output", q_width, n.width),
        q_norm=norm("attn_q_norm", widths[0]) if widths else None,
        k_norm=norm("attn_k_norm", widths[1]) if widths else None,
        ffn_norm=norm("ffn_norm", n.width),
        router=find("ffn_gate_inp", n.width, n.n_experts),
    )
