"""`moe-coord map`: how large each part of a model is, as bars or as JSON.

Sizes are those in the file; what the parts take in memory is the budget's business. Nothing is
loaded: everything follows from the header.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from compute_worker.arch import ModelSpec, resolve
from coordinator.command.commands import MapCommand
from coordinator.command.sizes import format_size
from coordinator.command.tables import console_on
from coordinator.core.slot_classes import smallest_pool_bytes, whole_pool_bytes
from coordinator.plan.budget import token_cycle_bytes
from io_worker.ggml_types import GGML_TYPES
from io_worker.gguf_header import TensorInfo
from io_worker.model_file import open_model
from io_worker.slabs import LayerSlabs
from shm.pool import ALIGNMENT

MIN_BAR_CELLS, MAX_BAR_CELLS = 8, 40
SIZE_CELLS = 14  # a size and the space between columns


@dataclass(frozen=True, slots=True)
class LayerMap:
    """One layer: bytes of its dense tensors, of one expert, and of all its experts."""

    layer: int
    dense_bytes: int
    slab_bytes: int
    experts_bytes: int
    types: tuple[str, str, str]  # of gate, up, down


@dataclass(frozen=True, slots=True)
class ModelMap:
    """The sizes of a model's parts in the file, in bytes."""

    model: str
    arch: str
    n_layers: int
    n_experts: int
    n_active: int
    file_bytes: int
    embedding_bytes: int
    attention_bytes: int
    router_bytes: int
    norm_bytes: int
    output_bytes: int  # 0: tied to the embedding
    experts_bytes: int
    active_experts_bytes: int  # the token cycle
    pages_per_expert: float  # that its bytes would fill
    pages_touched_per_expert: float  # that hold a byte of it: its ranges begin and end anywhere
    smallest_pool_bytes: int
    whole_pool_bytes: int
    layers: tuple[LayerMap, ...]

    @property
    def dense_bytes(self) -> int:
        """Everything that is no expert."""
        layers = self.attention_bytes + self.router_bytes + self.norm_bytes
        return self.embedding_bytes + layers + self.output_bytes

    @property
    def all_by_active(self) -> float:
        """Weights of the model ÷ weights one token multiplies with."""
        looked_up = self.embedding_bytes if self.output_bytes else 0  # one row of it per token
        active = self.dense_bytes - looked_up + self.active_experts_bytes
        return (self.dense_bytes + self.experts_bytes) / active

    def to_json(self) -> str:
        """One JSON object, sizes in bytes."""
        derived = {"dense_bytes": self.dense_bytes, "all_by_active": round(self.all_by_active, 3)}
        return json.dumps(dataclasses.asdict(self) | derived)


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the picture."""

    label: str
    remark: str
    n_bytes: int
    style: str


def show_map(command: MapCommand, output: TextIO | None) -> None:
    """Print the map of a model (None: to a closed standard output); raises `ModelFormatError`."""
    model = open_model(command.model)
    parts = model_map(str(command.model), sum(model.file_bytes), resolve(model))
    if output is None:
        return
    if command.json:
        print(parts.to_json(), file=output)
        return
    _draw(parts, console_on(output))


def model_map(name: str, file_bytes: int, spec: ModelSpec) -> ModelMap:
    """The map of a checked model. `file_bytes` counts all files of a set."""
    slabs = spec.slabs.layers
    per_layer = [
        (
            _sum(layer.q, layer.k, layer.v, layer.attn_output),
            layer.router.n_bytes,
            _sum(layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm),
        )
        for layer in spec.layers
    ]
    attention, router, norms = (sum(part) for part in zip(*per_layer, strict=True))
    return ModelMap(
        model=name,
        arch=spec.arch,
        n_layers=spec.n_layers,
        n_experts=spec.n_experts,
        n_active=spec.n_active,
        file_bytes=file_bytes,
        embedding_bytes=spec.token_embedding.n_bytes,
        attention_bytes=attention,
        router_bytes=router,
        norm_bytes=norms + spec.output_norm.n_bytes,
        output_bytes=0 if spec.output is None else spec.output.n_bytes,
        experts_bytes=spec.slabs.total_bytes,
        active_experts_bytes=token_cycle_bytes(spec),
        pages_per_expert=sum(x.slab_bytes for x in slabs) / len(slabs) / ALIGNMENT,
        pages_touched_per_expert=_pages_touched(slabs, spec.n_experts),
        smallest_pool_bytes=smallest_pool_bytes(spec.slabs),
        whole_pool_bytes=whole_pool_bytes(spec.slabs),
        layers=tuple(
            LayerMap(
                layer=layer.layer,
                dense_bytes=sum(per_layer[layer.layer]),
                slab_bytes=layer.slab_bytes,
                experts_bytes=layer.slab_bytes * spec.n_experts,
                types=(_type(layer.gate.type), _type(layer.up.type), _type(layer.down.type)),
            )
            for layer in slabs
        ),
    )


def _pages_touched(slabs: Sequence[LayerSlabs], n_experts: int) -> float:
    pages = sum(layer.pages(expert) for layer in slabs for expert in range(n_experts))
    return pages / (len(slabs) * n_experts)


def _sum(*tensors: TensorInfo | None) -> int:
    return sum(tensor.n_bytes for tensor in tensors if tensor is not None)


def _type(type_id: int) -> str:
    return GGML_TYPES[type_id].name


def _draw(parts: ModelMap, console: Console) -> None:
    whole = parts.dense_bytes + parts.experts_bytes
    name = os.fsencode(Path(parts.model).name).decode("utf-8", "backslashreplace")
    console.print(
        Text(
            f"{_printable(name)}: {parts.arch}, {parts.n_layers} layers, {parts.n_experts} experts "
            f"of which a token uses {parts.n_active}, {format_size(parts.file_bytes)}"
        )
    )
    _print_bars(console, "part", list(_part_rows(parts)), whole)
    largest = max(layer.experts_bytes for layer in parts.layers)
    _print_bars(console, "layer", list(_layer_rows(parts)), largest)
    for line in _summary(parts):
        console.print(Text(line))


def _part_rows(parts: ModelMap) -> Iterator[Bar]:
    yield Bar("dense", "every token needs it", parts.dense_bytes, "cyan")
    yield Bar("  embedding", "", parts.embedding_bytes, "blue")
    yield Bar("  attention", "", parts.attention_bytes, "blue")
    yield Bar("  routers", "", parts.router_bytes, "blue")
    yield Bar("  norms", "", parts.norm_bytes, "blue")
    output = "" if parts.output_bytes else "the embedding does it"
    yield Bar("  output", output, parts.output_bytes, "blue")
    n_experts = parts.n_experts * len(parts.layers)
    yield Bar("experts", f"{n_experts} of them", parts.experts_bytes, "green")
    yield Bar("  of one token", "the token cycle", parts.active_experts_bytes, "yellow")


def _layer_rows(parts: ModelMap) -> Iterator[Bar]:
    for layer in parts.layers:
        gate, up, down = layer.types
        types = gate if gate == up == down else f"{gate} {up} {down}"
        remark = f"{parts.n_experts} x {format_size(layer.slab_bytes)}, {types}"
        yield Bar(str(layer.layer), remark, layer.experts_bytes, "green")


def _print_bars(console: Console, title: str, bars: Sequence[Bar], full: int) -> None:
    """Bars in proportion to `full`, as wide as the terminal leaves; a part that is there has one
    cell at least."""
    cell = "█" if console.encoding.lower().startswith("utf") else "#"
    labels = max(len(text) for text in (title, *[bar.label for bar in bars]))
    room = console.width - labels - max(len(bar.remark) for bar in bars) - SIZE_CELLS
    n_cells = min(MAX_BAR_CELLS, max(MIN_BAR_CELLS, room))
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for name, justify in ((title, "left"), ("", "left"), ("size", "right"), ("", "left")):
        table.add_column(name, no_wrap=True, justify=cast(JustifyMethod, justify))
    for bar in bars:
        filled = max(1, round(bar.n_bytes / full * n_cells)) if bar.n_bytes else 0
        drawn = Text(cell * filled, style=bar.style)
        table.add_row(Text(bar.label), Text(bar.remark), Text(format_size(bar.n_bytes)), drawn)
    console.print(table)


def _summary(parts: ModelMap) -> Iterator[str]:
    yield (
        f"all / active: {parts.all_by_active:.1f}   "
        f"token cycle: {format_size(parts.active_experts_bytes)}"
    )
    more = parts.pages_touched_per_expert / parts.pages_per_expert - 1
    yield (
        f"pages per expert: touched {parts.pages_touched_per_expert:.1f}, filled "
        f"{parts.pages_per_expert:.1f}: reading past the page cache moves {more:.1%} more"
    )
    yield (
        f"pool: smallest {format_size(parts.smallest_pool_bytes)}, for every expert "
        f"{format_size(parts.whole_pool_bytes)}"
    )


def _printable(text: str) -> str:
    """A file name comes from outside: control characters must not reach the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
