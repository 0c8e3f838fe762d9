"""Packed files: what they hold, that other tools can read them, and what is refused."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from arms import pack
from gguf_builder import tiny_model
from read_cases import FaultyPreadv, opened, strict_direct

from compute_worker.arch import ModelSpec, resolve
from coordinator.core.geometry import PoolGeometry, pool_geometry
from coordinator.core.slot_classes import pool_layout
from coordinator.core.slots import SlotTable
from io_worker.gguf_header import ModelFormatError
from io_worker.model_file import open_model
from io_worker.model_units import units_of
from io_worker.packed_layout import CHECKSUMS_AT, CHECKSUMS_KEY, VERSION_KEY
from io_worker.read_queue import ReadQueue
from io_worker.slab_reader import SlabReader
from shm.messages import SlabsReady
from shm.pool import ALIGNMENT, PoolLayout, PoolMapping, align_up, create_pool

MODELS: dict[
    str, dict[str, Any]
] = {  # parts of slabs that fill pages and such that do not, of one type and of several
    "one type": {"n_layers": 2},
    "two slab sizes": {"n_layers": 4, "quantisation": "Q4_K_M", "n_active": 3},
    "types by role": {"n_layers": 1, "expert_types": (("Q4_K", "MXFP4", "Q5_0"),), "width": 256},
    "qwen3moe, tied": {"arch": "qwen3moe", "tied": True},
    "three files": {"n_layers": 3, "split": 3},
    "wide alignment": {"alignment": 512},
}


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain model and the packed one."""
    folder = tmp_path_factory.mktemp("model")
    plain = tiny_model(folder / "plain.gguf", **MODELS[request.param])
    return [plain, pack(plain, folder / "packed.gguf")]


def bytes_of(path: Path) -> dict[str, bytes]:
    """Every unit of a model, ranges joined."""
    model = open_model(path)
    files = [Path(name).read_bytes() for name in model.paths]
    return {
        unit.label: b"".join(
            files[found.file][found.offset : found.offset + found.n_bytes] for found in unit.ranges
        )
        for unit in units_of(model, resolve(model).slabs)
    }


def test_every_byte_of_the_weights_is_there(both: list[Path]) -> None:
    plain, packed = map(bytes_of, both)
    assert list(plain) == list(packed)
    assert plain == packed


def test_the_model_is_the_same(both: list[Path]) -> None:
    plain, packed = map(open_model, both)
    assert packed.fingerprint == plain.fingerprint
    own = ("moe_coord.packed.", "split.", "general.alignment")
    kept = [
        {key: value for key, value in model.metadata.items() if not key.startswith(own)}
        for model in (plain, packed)
    ]
    assert kept[0] == kept[1]
    shapes = [{(t.name, t.shape, t.type) for t in m.tensors.values()} for m in (plain, packed)]
    assert shapes[0] == shapes[1]


def test_every_slab_is_one_range_at_a_page(both: list[Path]) -> None:
    slabs = resolve(open_model(both[1])).slabs
    ends = []
    for layer in slabs.layers:
        for expert in range(slabs.n_experts):
            (found,) = layer.reads(expert)
            assert found.offset % ALIGNMENT == 0
            assert found.n_bytes <= sum(layer.windows)
            assert layer.pages(expert) == sum(layer.windows) // ALIGNMENT
            assert [part.offset % ALIGNMENT for part in layer.ranges(expert)] == [0, 0, 0]
            ends.append((found.offset, found.offset + sum(layer.windows)))
    assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]]
    assert ends[-1][1] == both[1].stat().st_size


def test_other_programs_read_it_as_gguf(both: list[Path]) -> None:
    model = open_model(both[1])
    layer = resolve(model).slabs.layers[0]
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(both[1]).tensors}
    expert = 5
    data = both[1].read_bytes()
    for role, part in zip(("gate", "up", "down"), layer.ranges(expert), strict=True):
        found = read[f"blk.0.ffn_{role}.{expert}.weight"]
        assert found.data.tobytes() == data[part.offset : part.offset + part.n_bytes]
    assert read["output_norm.weight"].data.tobytes() == bytes_of(both[0])["output_norm.weight"]


# Reading


def geometry_of(spec: ModelSpec) -> tuple[PoolLayout, PoolGeometry]:
    layout, classes = pool_layout(spec.slabs, spec.n_active, 1 << 40)
    return layout, pool_geometry(spec.slabs, layout, classes)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_reader_issues_one_read_for_a_slab(both: list[Path], depth: int) -> None:
    """Calls of `preadv` and bytes are counted; the bytes lie where compute is told."""
    contents = bytes_of(both[0])
    for path, reads_per_slab in zip(both, (3, 1), strict=True):
        model = open_model(path)
        if len(model.paths) > 1:
            continue
        spec = resolve(model)
        layout, geometry = geometry_of(spec)
        pool_fd = create_pool(layout)
        with opened(path) as file:
            file = strict_direct(file)
            preadv = FaultyPreadv(file.direct_fd)
            pool = PoolMapping(pool_fd, layout, writable=True)
            reader = SlabReader([file], pool.view, "direct", preadv=preadv)
            queue = ReadQueue(depth, reader, pool)
            over_read = read_all(geometry, queue, pool, contents)
            assert queue.close()
        n_slabs = len(geometry.all_keys())
        assert preadv.n_calls == n_slabs * reads_per_slab
        expected = [
            align_up(found.offset % ALIGNMENT + found.n_bytes) - found.n_bytes
            for layer in spec.slabs.layers
            for expert in range(spec.n_experts)
            for found in layer.reads(expert)
        ]
        at_end = sum(expected) - over_read  # the last unit of a plain file is cut short
        assert 0 <= at_end < (ALIGNMENT if reads_per_slab == 3 else 1)


def read_all(
    geometry: PoolGeometry, queue: ReadQueue, pool: PoolMapping, contents: dict[str, bytes]
) -> int:
    """Fill every slot and compare; bytes over-read."""
    from_core = Slots(geometry)
    queue.submit([geometry.read_of(slot) for slot in from_core.all])
    answers: list[SlabsReady] = []
    while len(answers) < len(from_core.all):
        for answer in queue.collect():
            assert isinstance(answer, SlabsReady), answer
            answers.append(answer)
    for slot in from_core.all:
        assert slot.key is not None
        layer, expert = slot.key
        place = geometry.location(slot)
        parts = [n_bytes for _, _, n_bytes in geometry.ranges_of(layer, expert)]
        found = b"".join(
            bytes(pool.view[start : start + n_bytes])
            for start, n_bytes in zip((place.gate, place.up, place.down), parts, strict=True)
        )
        assert found == contents[f"layer {layer} expert {expert}"]
        assert pool.holds(slot.number, slot.lease.generation, layer, expert)
    return sum(answer.bytes_over_read for answer in answers)


class Slots:
    """Every expert in a slot of its own."""

    def __init__(self, geometry: PoolGeometry) -> None:
        table = SlotTable(geometry.class_of_slots)
        self.all = []
        for key in geometry.all_keys():
            slot = table.take_free(geometry.class_of_layer[key[0]])
            assert slot is not None
            table.lease(slot, key)
            self.all.append(slot)


# Refusals


def packed_bytes(folder: Path) -> bytes:
    plain = tiny_model(folder / "m.gguf", n_layers=2)
    return pack(plain, folder / "p.gguf").read_bytes()


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def entry_value(data: bytes, key: str) -> int:
    """Where the value of a scalar key stands."""
    return data.index(key.encode()) + len(key) + 4


def next_to(data: bytes, name: str) -> int:
    """Where the offset of a tensor of two dimensions stands."""
    return data.index(name.encode()) + len(name) + 4 + 16 + 4


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "later version": (
        lambda data: changed(data, entry_value(data, VERSION_KEY), struct.pack("<I", 2)),
        r"packed.version: expected 1, found 2",
    ),
    "truncated": (lambda data: data[:-5000], "truncated or damaged"),
    "truncated in the header": (lambda data: data[:3000], "before the file ends|do not fit"),
    "a letter of a token": (
        lambda data: changed(data, data.index("Ġthe".encode()) + 2, b"q"),
        "header: expected checksum",
    ),
    "a checksum of the header": (
        lambda data: changed(data, CHECKSUMS_AT, bytes(8)), "header: expected checksum",
    ),
    "an expert elsewhere": (
        lambda data: changed(data, next_to(data, "blk.1.ffn_up.3.weight"), bytes(8)),
        r"ffn_up.3.weight|overlap",
    ),
    "an expert missing": (
        lambda data: data.replace(b"blk.1.ffn_up.3.weight", b"blk.1.ffn_xx.3.weight"),
        "layer 1 expert 3: expected gate, up and down",
    ),
    "experts of another layer": (
        lambda data: data.replace(b"blk.1.ffn_up.3.weight", b"blk.3.ffn_up.3.weight"),
        "experts: expected 8 of each of 3 layers",
    ),
    "no checksums": (
        lambda data: data.replace(CHECKSUMS_KEY.encode(), b"x" + CHECKSUMS_KEY.encode()[1:]),
        "expected an array, as the first key",
    ),
    "no fingerprint": (
        lambda data: data.replace(b"packed.fingerprint", b"packed.fingerprinx"), "32 hex digits",
    ),
    "not said to be packed": (
        lambda data: data.replace(VERSION_KEY.encode(), b"x" + VERSION_KEY.encode()[1:]),
        "one tensor per expert is an old layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_header_is_refused(tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    path = tmp_path / "p.gguf"
    path.write_bytes(damage(packed_bytes(tmp_path)))
    with pytest.raises(ModelFormatError, match=expected) as caught:
        resolve(open_model(path))
    assert str(caught.value).isprintable()


def test_a_flipped_bit_anywhere_in_the_header_is_refused(tmp_path: Path) -> None:
    """But in the checksums of tensors and slabs: those are compared by `verify`."""
    data = packed_bytes(tmp_path)
    stop = data.rindex(b"blk.1.ffn_down.7.weight") + len("blk.1.ffn_down.7.weight") + 32
    n_checksums = int.from_bytes(data[CHECKSUMS_AT - 8 : CHECKSUMS_AT], "little")
    array = range(CHECKSUMS_AT + 8, CHECKSUMS_AT + 8 * n_checksums)
    rng = random.Random(1)
    path = tmp_path / "flipped.gguf"
    for _ in range(200):
        at = rng.randrange(stop)
        path.write_bytes(changed(data, at, bytes([data[at] ^ 1 << rng.randrange(8)])))
        if at in array:
            resolve(open_model(path))
            continue
        with pytest.raises(ModelFormatError) as caught:
            resolve(open_model(path))
        assert str(caught.value).isprintable()
