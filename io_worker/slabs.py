"""Where each expert lies in the file: the slab table, made once from the tensors of the header.

The experts of a layer are three tensors, `blk.N.ffn_gate_exps.weight`, `…up…` and `…down…`, each
of three dimensions with the expert outermost::

    offset                    + bytes_per_expert          + 2 × bytes_per_expert
    | expert 0: n_rows rows   | expert 1                  | expert 2 …

so the slab of one expert is three ranges. Layers may differ in type and size, and so may gate, up
and down, which may also lie in different files of a split model. In a packed file (`packed_layout`)
the three follow each other, each at a page, and a slab is read as one range. The table is made of
integers and tuples only and travels to the workers in a message.

This module does not know the model's architecture: which layers have experts is told to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from io_worker.ggml_types import GGML_TYPES, WEIGHT_TYPES
from io_worker.gguf_header import ModelFormatError, TensorInfo
from io_worker.model_file import Model
from shm.messages import ReadRange
from shm.pool import ALIGNMENT, align_up, window_bytes

MAX_EXPERTS = 4096
_ROLES = ("gate", "up", "down")
_CONVERT_AGAIN = "convert the model again with a current converter"


@dataclass(frozen=True, slots=True)
class SlabRange:
    """Contiguous bytes of one file."""

    file: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One role (gate, up or down) of all experts of a layer: rows are outputs, columns inputs."""

    file: int
    offset: int
    bytes_per_expert: int
    type: int
    n_rows: int
    n_cols: int
    packed_stride_bytes: int | None = None  # None: no gap between two experts

    @property
    def stride_bytes(self) -> int:
        """From an expert to the next."""
        return self.packed_stride_bytes or self.bytes_per_expert

    def range_of(self, expert: int) -> SlabRange:
        offset = self.offset + expert * self.stride_bytes
        return SlabRange(self.file, offset, self.bytes_per_expert)


@dataclass(frozen=True, slots=True)
class LayerSlabs:
    """The experts of one layer."""

    layer: int
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor

    @property
    def range_bytes(self) -> tuple[int, int, int]:
        """Bytes of gate, up and down of one expert."""
        return (
            self.gate.bytes_per_expert,
            self.up.bytes_per_expert,
            self.down.bytes_per_expert,
        )

    @property
    def slab_bytes(self) -> int:
        return sum(self.range_bytes)

    @property
    def is_packed(self) -> bool:
        """Whether one read brings a slab."""
        return self.gate.packed_stride_bytes is not None

    @property
    def windows(self) -> tuple[int, int, int]:
        """Bytes of a slot that gate, up and down of one expert need."""
        room = align_up if self.is_packed else window_bytes
        gate, up, down = self.range_bytes
        return room(gate), room(up), room(down)

    def ranges(self, expert: int) -> tuple[SlabRange, SlabRange, SlabRange]:
        """The ranges of gate, up and down of `expert`."""
        return (self.gate.range_of(expert), self.up.range_of(expert), self.down.range_of(expert))

    def reads(self, expert: int) -> tuple[SlabRange, ...]:
        """What a reader has to read: these ranges, or the one that holds them in a packed file."""
        gate, up, down = self.ranges(expert)
        if not self.is_packed:
            return gate, up, down
        return (SlabRange(gate.file, gate.offset, down.offset + down.n_bytes - gate.offset),)

    def reads_into(self, expert: int, windows: tuple[int, int, int]) -> tuple[ReadRange, ...]:
        """The same, to a slot whose three windows begin at these bytes of the pool."""
        return tuple(
            ReadRange(found.file, found.offset, found.n_bytes, start + found.offset % ALIGNMENT)
            for found, start in zip(self.reads(expert), windows, strict=False)
        )

    def pages(self, expert: int) -> int:
        """Pages of the file that hold a byte of `expert`: what faults and direct reads move."""
        return sum(
            (found.offset + found.n_bytes - 1) // ALIGNMENT - found.offset // ALIGNMENT + 1
            for found in self.reads(expert)
        )


@dataclass(frozen=True, slots=True)
class SlabTable:
    """All experts of a model; `layers` are those that have experts, in ascending order."""

    n_experts: int
    layers: tuple[LayerSlabs, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the model is a packed file."""
        return any(layer.is_packed for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        return self.n_experts * sum([layer.slab_bytes for layer in self.layers])

    @property
    def mean_slab_bytes(self) -> int:
        """The size at which a disk is asked."""
        return sum(layer.slab_bytes for layer in self.layers) // len(self.layers)


def slab_table(model: Model, layers: Sequence[int], n_experts: int) -> SlabTable:
    """The slab table of `layers` (ascending), each with `n_experts` experts.

    Raises `ModelFormatError` naming the tensor that is missing or not as it must be.
    """
    if not 1 <= n_experts <= MAX_EXPERTS:
        raise ModelFormatError(
            model.paths[0], "expert_count", f"expected 1 to {MAX_EXPERTS}, found {n_experts}"
        )
    if len(layers) > len(model.tensors):  # so that a layer count from the file costs no memory
        raise ModelFormatError(
            model.paths[0],
            "block_count",
            f"expected tensors of {len(layers)} layers, found {len(model.tensors)} tensors",
        )
    _refuse_foreign_layouts(model, layers)
    return SlabTable(
        n_experts=n_experts,
        layers=tuple([_layer_slabs(model, layer, n_experts) for layer in layers]),
    )


def _refuse_foreign_layouts(model: Model, layers: Sequence[int]) -> None:
    """Experts kept in another way would be reported as missing, or be computed wrongly."""
    wanted = {f"blk.{layer}." for layer in layers}
    known = tuple([f"ffn_{role}_exps.weight" for role in _ROLES])
    for tensor in model.tensors.values():
        block, dot, rest = tensor.name.partition(".ffn_")
        if block + "." not in wanted or not dot or "ffn_" + rest in known:
            continue
        role, _, detail = rest.partition("_exps")
        if role == "gate_up" and detail:
            fault = f"fused gate and up experts are not supported; {_CONVERT_AGAIN}, unfused"
        elif role in _ROLES and detail == ".bias":
            fault = "experts with biases are not supported; use a model without them"
        elif role in _ROLES and detail:
            fault = "expected no further tensor for the experts; use a model without it"
        elif _is_single_expert(rest):
            fault = f"one tensor per expert is an old layout; {_CONVERT_AGAIN}"
        else:
            continue
        raise ModelFormatError(model.paths[tensor.file], tensor.name, fault)


def _is_single_expert(rest: str) -> bool:
    """`gate.0.weight` is expert 0 in files older than the joined tensors."""
    role, _, number = rest.removesuffix(".weight").partition(".")
    return role in _ROLES and number.isdecimal()


def _layer_slabs(model: Model, layer: int, n_experts: int) -> LayerSlabs:
    gate, up, down = [
        _expert_tensor(model, f"blk.{layer}.ffn_{role}_exps.weight", n_experts) for role in _ROLES
    ]
    for role, tensor, expected in (
        ("up", up, (gate.n_rows, gate.n_cols)),
        ("down", down, (gate.n_cols, gate.n_rows)),
    ):
        if (tensor.n_rows, tensor.n_cols) != expected:
            raise ModelFormatError(
                model.paths[tensor.file],
                f"blk.{layer}.ffn_{role}_exps.weight",
                f"expected {expected[0]} rows of {expected[1]} to fit the gate, "
                f"found {tensor.n_rows} rows of {tensor.n_cols}",
            )
    if model.is_packed:
        stride = sum(align_up(part.bytes_per_expert) for part in (gate, up, down))
        gate, up, down = [replace(part, packed_stride_bytes=stride) for part in (gate, up, down)]
    return LayerSlabs(layer, gate, up, down)


def _expert_tensor(model: Model, name: str, n_experts: int) -> ExpertTensor:
    tensor = model.tensors.get(name)
    if tensor is None:
        raise ModelFormatError(model.paths[0], name, "expected this tensor, found no such name")
    path = model.paths[tensor.file]
    if len(tensor.shape) != 3:
        raise ModelFormatError(
            path, name, f"expected 3 dimensions, found {len(tensor.shape)}: {tensor.shape}"
        )
    n_cols, n_rows, n_found = tensor.shape
    if n_found != n_experts:
        raise ModelFormatError(path, name, f"expected {n_experts} experts, found {n_found}")
    if tensor.type not in WEIGHT_TYPES:
        raise ModelFormatError(
            path, name, f"expected weights, found type {GGML_TYPES[tensor.type].name}"
        )
    return ExpertTensor(
        file=tensor.file,
        offset=tensor.offset,
        bytes_per_expert=_whole_experts(tensor, n_experts),
        type=tensor.type,
        n_rows=n_rows,
        n_cols=n_cols,
    )


def _whole_experts(tensor: TensorInfo, n_experts: int) -> int:
    """Experts are the outermost dimension and rows whole blocks, so they divide the bytes."""
    bytes_per_expert, rest = divmod(tensor.n_bytes, n_experts)
    assert rest == 0, tensor
    return bytes_per_expert
