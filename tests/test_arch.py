"""`resolve` on good files of both architectures and on every fault of rows F15 to F17."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf.quants
import pytest
from gguf_builder import tiny_model, vocabulary
from gguf_bytes import ARRAY, F32, F64, I32, STRING, U32, array, entry

from compute_worker.arch import (
    ARCHS,
    WEIGHT_TYPES,
    ModelSpec,
    dense_bytes,
    dense_tensors,
    kv_block_bytes,
    resolve,
)
from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from shm.codec import decoder_for, pack, unpack

N_VOCABULARY = len(vocabulary()[0])


def spec_of(folder: Path, **options: Any) -> ModelSpec:
    return resolve(open_model(tiny_model(folder / "model.gguf", **options)))


def keys(**values: tuple[int, object] | None) -> dict[str, bytes | None]:
    """Entries of olmoe by short name; `__` stands for a dot. None removes the key."""
    entries: dict[str, bytes | None] = {}
    for name, value in values.items():
        key = "olmoe." + name.replace("__", ".")
        entries[key] = entry(key, *value) if value else None
    return entries


def test_olmoe(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arch="olmoe", n_layers=3)
    assert (spec.arch, spec.n_layers, spec.width, spec.expert_width) == ("olmoe", 3, 64, 64)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_width, spec.rope_width) == (4, 4, 16, 16)
    assert (spec.n_experts, spec.n_active, spec.context_length) == (8, 2, 512)
    assert (spec.rope_base, spec.norm_topk, spec.qk_norm) == (10_000.0, False, "whole")
    assert spec.output is not None and spec.output.name == "output.weight"
    assert spec.layers[2].q_norm is not None and spec.layers[2].q_norm.shape == (64,)
    assert spec.layers[1].router.name == "blk.1.ffn_gate_inp.weight"
    assert len(spec.slabs.layers) == 3 and spec.slabs.n_experts == 8


def test_qwen3moe(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arch="qwen3moe")
    assert (spec.n_heads, spec.n_kv_heads, spec.head_width) == (4, 2, 32)
    assert (spec.rope_base, spec.norm_topk, spec.qk_norm) == (1e6, True, "head")
    assert spec.layers[0].k_norm is not None and spec.layers[0].k_norm.shape == (32,)


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"arch": "olmoe", "rope_base_key": False}, "rope_base", 10_000.0),
        ({"arch": "qwen3moe", "rope_base_key": False}, "rope_base", 1_000_000.0),
        # feed_forward_length is then expert_width * n_active
        ({"arch": "qwen3moe", "expert_width_key": False, "expert_width": 96}, "expert_width", 96),
        ({"arch": "qwen3moe", "tied": True}, "output", None),
        ({"arch": "olmoe", "entries": keys(rope__dimension_count=(U32, 8))}, "rope_width", 8),
        ({"arch": "olmoe", "entries": keys(attention__head_count_kv=None)}, "n_kv_heads", 4),
        ({"arch": "olmoe", "n_active": 8}, "n_active", 8),
        ({"arch": "olmoe", "n_experts": 1, "n_active": 1}, "n_experts", 1),
        # keys that change nothing are no reason to refuse a file
        ({"entries": keys(rope__scaling__type=(STRING, "none"))}, "rope_base", 10_000.0),
        ({"entries": keys(expert_shared_count=(U32, 0))}, "n_experts", 8),
        ({"entries": keys(expert_feed_forward_length=(U32, 64))}, "expert_width", 64),
    ],
)
def test_what_may_be_absent_or_odd(
    tmp_path: Path, options: dict[str, Any], field: str, expected: object
) -> None:
    assert getattr(spec_of(tmp_path, **options), field) == expected


def test_types_may_differ_per_tensor(tmp_path: Path) -> None:
    kinds = (("IQ4_NL", "Q5_0", "Q8_0"), ("Q4_1", "MXFP4", "BF16"))
    slabs = spec_of(tmp_path, expert_types=kinds).slabs
    for layer, names in zip(slabs.layers, kinds, strict=True):
        tensors = (layer.gate, layer.up, layer.down)
        assert tuple([GGML_TYPES[tensor.type].name for tensor in tensors]) == names


MISFITS: list[tuple[dict[str, Any], str]] = [
    # F15
    ({"entries": keys(expert_count=(U32, 0))}, "olmoe.expert_count: expected an integer 1..4096"),
    ({"entries": keys(expert_count=(U32, 2**31))}, "found 2147483648"),
    (
        {"entries": keys(expert_count=None)},
        "olmoe.expert_count: expected an integer 1..4096, found",
    ),
    (
        {"entries": keys(expert_count=(U32, 7))},
        "blk.0.ffn_gate_exps.weight: expected 7 experts, found 8",
    ),
    (
        {"shapes": {"blk.1.ffn_up_exps.weight": (64, 64, 4)}},
        "blk.1.ffn_up_exps.weight: expected 8 experts, found 4",
    ),
    (
        {"shapes": {"blk.1.ffn_down_exps.weight": (64, 64 * 8)}},
        "blk.1.ffn_down_exps.weight: expected 3 dimensions, found 2: (64, 512)",
    ),
    ({"entries": keys(expert_used_count=(U32, 0))}, "olmoe.expert_used_count: expected an integer"),
    ({"entries": keys(expert_used_count=(U32, 9))}, "expected an integer 1..8, found 9"),
    # F16
    ({"entries": keys(attention__head_count=(U32, 0))}, "olmoe.attention.head_count: expected"),
    (
        {"entries": keys(attention__head_count_kv=(U32, 3))},
        "olmoe.attention.head_count_kv: expected a divisor of 4 heads, found 3",
    ),
    ({"entries": keys(attention__head_count_kv=(U32, 8))}, "expected an integer 1..4, found 8"),
    (
        {"entries": keys(attention__head_count=(U32, 5), attention__head_count_kv=(U32, 5))},
        "olmoe.attention.key_length: expected an integer 1..65536, found nothing",
    ),
    (
        {"entries": keys(attention__head_count=(ARRAY, array(I32, [4, 4])))},
        "olmoe.attention.head_count: expected an integer 1..65536, found [4, 4]",
    ),
    (
        {"entries": keys(attention__value_length=(U32, 8))},
        "olmoe.attention.value_length: expected the key length 16, found 8",
    ),
    ({"entries": keys(rope__dimension_count=(U32, 7))}, "expected an even number, found 7"),
    ({"entries": keys(rope__dimension_count=(U32, 18))}, "expected an integer 2..16, found 18"),
    ({"entries": keys(rope__dimension_count=(U32, 0))}, "expected an integer 2..16, found 0"),
    ({"entries": keys(context_length=(U32, 0))}, "olmoe.context_length: expected an integer"),
    ({"entries": keys(context_length=(10, 2**40))}, "found 1099511627776"),
    ({"entries": keys(block_count=(U32, 0))}, "olmoe.block_count: expected an integer 1..1024"),
    ({"entries": keys(block_count=(U32, 2**31))}, "olmoe.block_count: expected an integer"),
    ({"entries": keys(block_count=(U32, 3))}, "blk.2.ffn_gate_exps.weight: expected this tensor"),
    (
        {"entries": keys(block_count=(U32, 1))},
        "blk.1.attn_k.weight: expected no such tensor in olmoe with 1 layers, found [64, 64]",
    ),
    ({"entries": keys(embedding_length=(U32, 0))}, "olmoe.embedding_length: expected"),
    ({"entries": keys(embedding_length=(F32, 64.0))}, "expected an integer 1..1048576, found 64.0"),
    ({"entries": keys(feed_forward_length=None)}, "olmoe.feed_forward_length: expected"),
    ({"entries": keys(rope__freq_base=(F32, 0.0))}, "olmoe.rope.freq_base: expected a number"),
    ({"entries": keys(rope__freq_base=(F64, float("inf")))}, "found inf"),
    ({"entries": keys(rope__freq_base=(U32, 10000))}, "expected a number 1..1e+12, found 10000"),
    (
        {"entries": keys(attention__layer_norm_rms_epsilon=(F32, float("nan")))},
        "olmoe.attention.layer_norm_rms_epsilon: expected a number 1e-12..1, found nan",
    ),
    ({"entries": keys(attention__layer_norm_rms_epsilon=None)}, "found nothing"),
    # F17
    ({"without": ("blk.1.attn_v.weight",)}, "blk.1.attn_v.weight: expected a tensor of shape"),
    ({"without": ("output_norm.weight",)}, "output_norm.weight: expected a tensor of shape [64]"),
    ({"without": ("token_embd.weight",)}, "token_embd.weight: expected a tensor of shape"),
    ({"arch": "olmoe", "tied": True}, "output.weight: expected a tensor of shape"),
    (
        {"shapes": {"blk.0.attn_q.weight": (32, 128)}},
        "blk.0.attn_q.weight: expected shape [64, 64], found [32, 128]",
    ),
    (
        {"arch": "qwen3moe", "shapes": {"blk.0.attn_q_norm.weight": (16,)}},
        "blk.0.attn_q_norm.weight: expected shape [32], found [16]",
    ),
    (
        {"entries": {"general.architecture": entry("general.architecture", STRING, "llama")}},
        "general.architecture: expected one of olmoe, qwen3moe, found 'llama'",
    ),
    (
        {"entries": {"general.architecture": None}},
        "general.architecture: expected one of olmoe, qwen3moe, found nothing",
    ),
    (
        {"entries": {"general.architecture": entry("general.architecture", U32, 7)}},
        "general.architecture: expected one of olmoe, qwen3moe, found 7",
    ),
    # what would have to be ignored
    ({"entries": keys(rope__scaling__type=(STRING, "yarn"))}, "olmoe.rope.scaling.type: expected"),
    ({"entries": keys(rope__scaling__factor=(F32, 4.0))}, "olmoe.rope.scaling.factor: expected"),
    ({"entries": keys(rope__scale_linear=(F32, 2.0))}, "olmoe.rope.scale_linear: expected 0.0 or"),
    ({"entries": keys(attention__clamp_kqv=(F32, 8.0))}, "olmoe.attention.clamp_kqv: expected 0.0"),
    ({"entries": keys(expert_gating_func=(U32, 2))}, "olmoe.expert_gating_func: expected 1"),
    ({"entries": keys(expert_weights_scale=(F32, 2.5))}, "olmoe.expert_weights_scale: expected"),
    ({"entries": keys(expert_weights_norm=(7, True))}, "olmoe.expert_weights_norm: expected False"),
    ({"entries": keys(expert_shared_count=(U32, 1))}, "olmoe.expert_shared_count: expected 0"),
    (
        {"entries": keys(leading_dense_block_count=(U32, 1))},
        "leading_dense_block_count: expected 0",
    ),
    ({"entries": keys(nextn_predict_layers=(U32, 1))}, "olmoe.nextn_predict_layers: expected 0"),
    # tokenizer and embedding disagree
    (
        {
            "entries": {
                "tokenizer.ggml.tokens": entry(
                    "tokenizer.ggml.tokens", ARRAY, array(STRING, ["a", "b"])
                )
            }
        },
        "token_embd.weight: expected shape [64, 2], found [64, ",
    ),
]


@pytest.mark.parametrize(("options", "text"), MISFITS, ids=[text for _, text in MISFITS])
def test_misfits_are_refused_by_name(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        spec_of(tmp_path, **options)
    message = str(caught.value)
    assert text in message
    assert message.startswith(str(tmp_path)) and "\n" not in message


@pytest.mark.parametrize(
    ("other", "advice"),
    [
        ("blk.0.ffn_gate_up_exps.weight", "fused gate and up experts are not supported; convert"),
        ("blk.0.ffn_gate.0.weight", "one tensor per expert is an old layout; convert"),
    ],
)
def test_other_layouts_of_experts_get_advice(tmp_path: Path, other: str, advice: str) -> None:
    """And not only the name of a tensor that they do not have."""
    model = open_model(tiny_model(tmp_path / "model.gguf"))
    tensors = dict(model.tensors)
    gate = tensors.pop("blk.0.ffn_gate_exps.weight")
    tensors[other] = dataclasses.replace(gate, name=other)
    with pytest.raises(ModelFormatError) as caught:
        resolve(dataclasses.replace(model, tensors=tensors))
    assert f"{other}: {advice}" in str(caught.value)


def test_a_hostile_name_is_shown_short_and_on_one_line(tmp_path: Path) -> None:
    name = entry("general.architecture", STRING, "\x1b[31m\n" + "x" * 100_000)
    with pytest.raises(ModelFormatError) as caught:
        spec_of(tmp_path, entries={"general.architecture": name})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_file_that_names_the_wrong_architecture(tmp_path: Path) -> None:
    entries = {"general.architecture": entry("general.architecture", STRING, "qwen3moe")}
    with pytest.raises(ModelFormatError, match=r"qwen3moe\.embedding_length: expected"):
        spec_of(tmp_path, arch="olmoe", entries=entries)


def test_weight_types_are_those_that_can_be_dequantised() -> None:
    known = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert known == WEIGHT_TYPES
    assert {kind.name for kind in GGML_TYPES.values()} >= WEIGHT_TYPES


def test_dense_tensors_are_all_but_the_experts(tmp_path: Path) -> None:
    for options in ({"arch": "olmoe"}, {"arch": "qwen3moe", "tied": True}):
        model = open_model(tiny_model(tmp_path / "model.gguf", **options))
        names = [info.name for info in dense_tensors(resolve(model))]
        assert sorted(names) == sorted(name for name in model.tensors if "_exps" not in name)


def test_sizes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arch="qwen3moe", tied=True, n_layers=1)
    float_elements = 64 + (64 + 64 + 32 + 32) + 8 * 64  # output norm; norms of the layer; router
    q8_0_rows = N_VOCABULARY + (128 + 64 + 64) + 64 * 2  # embedding; q, k, v; attention output
    padding = -N_VOCABULARY * 68 % 64  # the other tensors are whole cache lines
    assert dense_bytes(spec) == 4 * float_elements + q8_0_rows * 68 + padding
    assert kv_block_bytes(spec, "f32") == 2 * 2 * 64 * 32 * 4
    assert kv_block_bytes(spec, "f16") == 2 * 2 * 64 * 32 * 2
    assert kv_block_bytes(spec, "q8_0") == 2 * 2 * 64 * 34


@pytest.mark.parametrize("arch", list(ARCHS))
def test_a_spec_travels(tmp_path: Path, arch: str) -> None:
    spec = spec_of(tmp_path, arch=arch, split=3)
    _, fields = unpack(pack("spec", spec))
    assert decoder_for(ModelSpec)(fields) == spec
