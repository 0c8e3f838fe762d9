"""The slab table: where each expert's bytes lie, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_builder import tiny_model
from gguf_bytes import gguf, tensor_entry
from hypothesis import given
from hypothesis import strategies as st

from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import Model, open_model
from io_worker.slabs import ExpertTensor, LayerSlabs, SlabRange, SlabTable, slab_table
from shm.codec import decoder_for, pack, unpack

MIXED = (("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "IQ4_XS", "Q8_0"), ("F16", "MXFP4", "Q3_K"))


def experts_of(path: Path) -> dict[str, Any]:
    """The bytes of the expert tensors, experts outermost, as the gguf package sees them."""
    return {
        tensor.name: tensor.data.view(np.uint8)
        for tensor in GGUFReader(path).tensors
        if "_exps" in tensor.name
    }


@pytest.mark.parametrize("arch", ["olmoe", "qwen3moe"])
def test_every_range_holds_its_expert(tmp_path: Path, arch: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", arch=arch, n_layers=3, expert_types=MIXED, width=256)
    table = slab_table(open_model(path), range(3), 8)
    content, experts = path.read_bytes(), experts_of(path)
    assert [layer.layer for layer in table.layers] == [0, 1, 2]
    for layer in table.layers:
        for expert in range(8):
            for role, place in zip(("gate", "up", "down"), layer.ranges(expert), strict=True):
                expected = experts[f"blk.{layer.layer}.ffn_{role}_exps.weight"][expert].tobytes()
                assert content[place.offset : place.offset + place.n_bytes] == expected


@pytest.mark.parametrize(
    ("offset", "n_bytes", "pages"), [(0, 4096, 3), (32, 4096, 6), (4095, 1, 3), (4095, 2, 6)]
)
def test_pages_that_an_expert_touches(offset: int, n_bytes: int, pages: int) -> None:
    part = ExpertTensor(0, offset, n_bytes, 0, 1, 1)
    layer = LayerSlabs(0, part, part, part)
    assert layer.pages(0) == pages
    everything = sum(layer.pages(expert) for expert in range(4096))
    assert everything >= 3 * n_bytes  # neighbours share a page


def test_sizes_and_types_of_layers_may_differ(tmp_path: Path) -> None:
    path = tiny_model(
        tmp_path / "m.gguf", n_layers=3, expert_types=MIXED, width=256, expert_width=512
    )
    table = slab_table(open_model(path), range(3), 8)
    for layer, names in zip(table.layers, MIXED, strict=True):
        kinds = [GGML_TYPES[tensor.type].name for tensor in (layer.gate, layer.up, layer.down)]
        assert tuple(kinds) == names
        assert (layer.gate.n_rows, layer.gate.n_cols) == (512, 256)
        assert (layer.up.n_rows, layer.up.n_cols) == (512, 256)
        assert (layer.down.n_rows, layer.down.n_cols) == (256, 512)
    assert table.layers[0].range_bytes == (512 * 144, 512 * 144, 256 * 2 * 210)
    assert table.layers[2].range_bytes == (512 * 512, 512 * 8 * 17, 256 * 2 * 110)
    assert table.layers[0].slab_bytes == 512 * 144 * 2 + 256 * 420
    assert table.total_bytes == 8 * sum([layer.slab_bytes for layer in table.layers])


def test_roles_may_lie_in_different_files(tmp_path: Path) -> None:
    one = slab_table(open_model(tiny_model(tmp_path / "m.gguf")), range(2), 8)
    model = open_model(tiny_model(tmp_path / "m.gguf", split=3))
    table = slab_table(model, range(2), 8)
    assert {layer.gate.file for layer in table.layers}.isdisjoint(
        {layer.up.file for layer in table.layers} | {layer.down.file for layer in table.layers}
    )
    single = (tmp_path / "m.gguf").read_bytes()
    for layer, alone in zip(table.layers, one.layers, strict=True):
        for place, original in zip(layer.ranges(5), alone.ranges(5), strict=True):
            part = Path(model.paths[place.file]).read_bytes()
            assert (
                part[place.offset : place.offset + place.n_bytes]
                == single[original.offset : original.offset + original.n_bytes]
            )


def test_only_the_layers_asked_for(tmp_path: Path) -> None:
    model = open_model(tiny_model(tmp_path / "m.gguf", n_layers=3))
    assert [layer.layer for layer in slab_table(model, [1, 2], 8).layers] == [1, 2]
    assert slab_table(model, [], 8) == SlabTable(8, ())


def test_the_table_travels_in_a_message(tmp_path: Path) -> None:
    table = slab_table(open_model(tiny_model(tmp_path / "m.gguf")), range(2), 8)
    _, fields = unpack(pack("SlabTable", table))
    assert decoder_for(SlabTable)(fields) == table


@given(expert=st.integers(0, 4095), n_bytes=st.integers(1, 2**30), offset=st.integers(0, 2**40))
def test_ranges_of_neighbours_touch(expert: int, n_bytes: int, offset: int) -> None:
    tensor = ExpertTensor(0, offset, n_bytes, 0, 1, 1)
    layer = LayerSlabs(0, tensor, replace(tensor, file=1), replace(tensor, file=2))
    for file, (place, after) in enumerate(
        zip(layer.ranges(expert), layer.ranges(expert + 1), strict=True)
    ):
        assert place == SlabRange(file, offset + expert * n_bytes, n_bytes)
        assert after.offset == place.offset + place.n_bytes


GATE, UP, DOWN = [f"blk.1.ffn_{role}_exps.weight" for role in ("gate", "up", "down")]

BAD_SHAPES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "fewer-experts": (UP, (64, 64, 4), f"{UP}: expected 8 experts, found 4"),
    "more-experts": (DOWN, (32, 64, 16), f"{DOWN}: expected 8 experts, found 16"),
    "one-expert": (GATE, (64, 512, 1), f"{GATE}: expected 8 experts, found 1"),
    "two-dimensions": (GATE, (64, 512), f"{GATE}: expected 3 dimensions, found 2"),
    "four-dimensions": (DOWN, (64, 64, 4, 2), f"{DOWN}: expected 3 dimensions, found 4"),
    "experts-innermost": (UP, (32, 64, 16), f"{UP}: expected 8 experts, found 16"),
    "up-unlike-gate": (UP, (32, 128, 8), f"{UP}: expected 64 rows of 64 to fit the gate"),
    "down-unlike-gate": (DOWN, (32, 128, 8), f"{DOWN}: expected 64 rows of 64 to fit the gate"),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_refuses_shapes_that_do_not_fit(tmp_path: Path, case: str) -> None:
    name, shape, fragment = BAD_SHAPES[case]
    model = open_model(tiny_model(tmp_path / "m.gguf", shapes={name: shape}))
    with pytest.raises(ModelFormatError, match="expected") as caught:
        slab_table(model, range(2), 8)
    assert fragment in str(caught.value)


@pytest.mark.parametrize("name", [GATE, UP, DOWN])
def test_refuses_a_missing_tensor(tmp_path: Path, name: str) -> None:
    model = open_model(tiny_model(tmp_path / "m.gguf", without=(name,)))
    with pytest.raises(ModelFormatError) as caught:
        slab_table(model, range(2), 8)
    assert f"{name}: expected this tensor, found no such name" in str(caught.value)


@pytest.mark.parametrize("kind", ["I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"])
def test_refuses_types_that_hold_no_weights(tmp_path: Path, kind: str) -> None:
    type_id = next(known.id for known in GGML_TYPES.values() if known.name == kind)
    model = _model(tmp_path, {}, kind=type_id)
    with pytest.raises(ModelFormatError, match=f"expected weights, found type {kind}"):
        slab_table(model, [0], 2)


FOREIGN = {
    "blk.0.ffn_gate_up_exps.weight": "fused gate and up experts are not supported",
    "blk.0.ffn_gate_up_exps.bias": "fused gate and up experts are not supported",
    "blk.0.ffn_gate_exps.bias": "experts with biases are not supported",
    "blk.0.ffn_up_exps.bias": "experts with biases are not supported",
    "blk.0.ffn_down_exps.bias": "experts with biases are not supported",
    "blk.0.ffn_down_exps.scale": "expected no further tensor for the experts",
    "blk.0.ffn_gate_exps_s": "expected no further tensor for the experts",
    "blk.0.ffn_gate.0.weight": "one tensor per expert is an old layout; convert the model again",
    "blk.0.ffn_down.0.weight": "one tensor per expert is an old layout; convert the model again",
    "blk.0.ffn_up.63.weight": "one tensor per expert is an old layout; convert the model again",
}


def _model(
    folder: Path, others: dict[str, tuple[int, ...]], *, kind: int = 0, experts: bool = True
) -> Model:
    """A file with 2 experts of 256 × 256 in layer 0, and other tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    if experts:
        shapes = {f"blk.0.ffn_{role}_exps.weight": (256, 256, 2) for role in ("gate", "up", "down")}
    shapes |= others
    size = 256 * 256 * 2 * 8
    tensors = [
        tensor_entry(name, shape, kind, size * index)
        for index, (name, shape) in enumerate(shapes.items())
    ]
    path = folder / "m.gguf"
    path.write_bytes(gguf([], tensors))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size * len(shapes))
    return open_model(path)


@pytest.mark.parametrize("with_plain_experts", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_refuses_other_layouts_by_name(tmp_path: Path, name: str, with_plain_experts: bool) -> None:
    model = _model(tmp_path, {name: (256, 256)}, experts=with_plain_experts)
    with pytest.raises(ModelFormatError) as caught:
        slab_table(model, [0], 2)
    assert f"{name}: {FOREIGN[name]}" in str(caught.value)


def test_dense_neighbours_are_no_concern(tmp_path: Path) -> None:
    names = ("ffn_gate_shexp.weight", "ffn_gate_inp.weight", "ffn_norm.weight", "ffn_up.weight")
    others: dict[str, tuple[int, ...]] = {f"blk.0.{name}": (256,) for name in names}
    others |= {"blk.1.ffn_down.0.weight": (256,), "blk.10.ffn_gate_exps.bias": (256,)}
    assert len(slab_table(_model(tmp_path, others), [0], 2).layers) == 1


@pytest.mark.parametrize("n_experts", [0, 4097, 2**31])
def test_refuses_an_absurd_number_of_experts(tmp_path: Path, n_experts: int) -> None:
    model = _model(tmp_path, {})
    with pytest.raises(ModelFormatError, match=f"expected 1 to 4096, found {n_experts}"):
        slab_table(model, [0], n_experts)


def test_an_absurd_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    model = _model(tmp_path, {})
    with pytest.raises(ModelFormatError, match="expected tensors of 4294967295 layers, found 3"):
        slab_table(model, range(2**32 - 1), 2)
