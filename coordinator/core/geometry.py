"""The pool as the decision core sees it, and what the core counts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.core.busy_time import BusyTime
from coordinator.core.slots import Slot
from io_worker.slabs import SlabTable
from shm.messages import Location, ReadRange, SlabRead, SlabsReady
from shm.pool import ALIGNMENT, PoolLayout

PART_BYTES = 32 << 20  # copying it takes some 10 ms, which a step between two parts has to wait
RangesOf = Callable[[int, int], tuple[tuple[int, int, int], ...]]  # (layer, expert) -> file ranges


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The pool as the core sees it: windows of every slot, class of every slot and layer."""

    windows_of_slots: Sequence[tuple[int, int, int]]
    class_of_slots: list[int]
    class_of_layer: dict[int, int]
    n_experts: int
    ranges_of: RangesOf  # gate, up and down: three (file, offset, bytes)
    alignment: int
    is_packed: bool = False  # the three lie together, page by page: one read brings them
    part_bytes: int = PART_BYTES  # of experts that move into compute's own memory at once

    @property
    def slots_of_class(self) -> tuple[int, ...]:
        """Slots of each class, by class."""
        n_slots = Counter(self.class_of_slots)
        return tuple(n_slots[slot_class] for slot_class in range(len(n_slots)))

    def share_of_layers(self, slots_of_class: Sequence[int]) -> dict[int, int]:
        """Slots of each layer if its class were divided evenly; at least the smallest legal 2."""
        n_layers = Counter(self.class_of_layer.values())
        return {
            layer: max(2, slots_of_class[slot_class] // n_layers[slot_class])
            for layer, slot_class in self.class_of_layer.items()
        }

    def whole_layers(self, slots_of_class: Sequence[int]) -> set[int]:
        """Layers of classes with a slot for every expert: nothing of theirs is ever evicted."""
        n_layers = Counter(self.class_of_layer.values())
        return {
            layer
            for layer, slot_class in self.class_of_layer.items()
            if slots_of_class[slot_class] >= n_layers[slot_class] * self.n_experts
        }

    @property
    def holds_everything(self) -> bool:
        """Whether there is a slot for every expert."""
        return len(self.class_of_slots) == len(self.class_of_layer) * self.n_experts

    def all_keys(self) -> list[tuple[int, int]]:
        """Every expert, in layer order."""
        layers = sorted(self.class_of_layer)
        return [(layer, expert) for layer in layers for expert in range(self.n_experts)]

    def next_layer(self, layer: int) -> int | None:
        """The layer that computes after this one."""
        return layer + 1 if layer + 1 in self.class_of_layer else None

    def location(self, slot: Slot) -> Location:
        """Where compute finds the expert that lies in the slot."""
        assert slot.key is not None
        layer, expert = slot.key
        return Location(expert, slot.lease, 0, *self._starts(slot, layer, expert))

    def read_of(self, slot: Slot) -> SlabRead:
        """What a reader has to do to fill the slot with its key."""
        assert slot.key is not None
        layer, expert = slot.key
        starts = self._starts(slot, layer, expert)
        ranges = zip(self.reads_of(layer, expert), starts, strict=not self.is_packed)
        return SlabRead(
            slot.lease,
            layer,
            expert,
            tuple(
                ReadRange(file, offset, n_bytes, start) for (file, offset, n_bytes), start in ranges
            ),
        )

    def reads_of(self, layer: int, expert: int) -> tuple[tuple[int, int, int], ...]:
        """What a reader reads: the three ranges, or the one from the first byte to the last."""
        ranges = self.ranges_of(layer, expert)
        if not self.is_packed:
            return ranges
        (file, start, _), (_, last, n_bytes) = ranges[0], ranges[-1]
        return ((file, start, last + n_bytes - start),)

    def _starts(self, slot: Slot, layer: int, expert: int) -> tuple[int, int, int]:
        """Pool offset of the first byte of gate, up and down: window + file offset % alignment; as
        far behind the slot's start as in the file where they come in one piece."""
        windows = self.windows_of_slots[slot.number]
        if self.is_packed:
            offsets = [offset for _, offset, _ in self.ranges_of(layer, expert)]
            gate, up, down = (windows[0] + offset - offsets[0] for offset in offsets)
            return gate, up, down
        gate, up, down = (
            window + offset % self.alignment
            for window, (_, offset, _) in zip(windows, self.ranges_of(layer, expert), strict=True)
        )
        return gate, up, down


def pool_geometry(
    slabs: SlabTable, layout: PoolLayout, class_of_layers: Sequence[int]
) -> PoolGeometry:
    """The pool of a model; `class_of_layers` has the class of each layer of the table, in order."""
    layers = [layer.layer for layer in slabs.layers]
    return PoolGeometry(
        windows_of_slots=layout.windows_of_slots(),
        class_of_slots=layout.class_of_slots(),
        class_of_layer=dict(zip(layers, class_of_layers, strict=True)),
        n_experts=slabs.n_experts,
        ranges_of=ranges_of(slabs),
        alignment=ALIGNMENT,
        is_packed=slabs.is_packed,
    )


def ranges_of(slabs: SlabTable) -> RangesOf:
    """Where the parts of an expert lie, as plain numbers."""
    by_layer = {
        layer.layer: [
            (part.file, part.offset, part.stride_bytes, part.bytes_per_expert)
            for part in (layer.gate, layer.up, layer.down)
        ]
        for layer in slabs.layers
    }

    def ranges_of_expert(layer: int, expert: int) -> tuple[tuple[int, int, int], ...]:
        parts = by_layer[layer]
        return tuple([(file, start + expert * step, n) for file, start, step, n in parts])

    return ranges_of_expert


@dataclass(slots=True)
class ExpertCounters:
    """Totals since the start. `requests` = hits + misses."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reads: int = 0
    reads_failed: int = 0
    slots_lost: int = 0  # found written over, and read again
    stale_answers: int = 0
    bytes_read: int = 0
    bytes_over_read: int = 0
    read_ns: int = 0  # of all reads, also side by side
    reading: BusyTime = field(default_factory=BusyTime)  # at least one was under way

    def add_need(self, n_hits: int, n_misses: int) -> None:
        """One more layer asked for experts."""
        self.requests += n_hits + n_misses
        self.hits += n_hits
        self.misses += n_misses

    def add_read(self, ready: SlabsReady) -> None:
        """One more slab came from a reader."""
        self.add_used(ready.bytes_read)
        self.add_cost(ready)

    def add_used(self, n_bytes: int) -> None:
        """One more slab is there: compute has it, its reader's answer is still on the way."""
        self.reads += 1
        self.bytes_read += n_bytes

    def add_cost(self, ready: SlabsReady) -> None:
        """That answer: what only the reader knows."""
        self.bytes_over_read += ready.bytes_over_read
        self.read_ns += ready.stop_ns - ready.start_ns
        self.reading.add(ready.start_ns, ready.stop_ns)


@dataclass(slots=True)
class ResizeCounters:
    """Of a pool that shrinks and grows, totals since the start."""

    shrinks: int = 0  # times that slots were given up, not slots
    grows: int = 0
    slots_retired: int = 0
    slots_restored: int = 0
