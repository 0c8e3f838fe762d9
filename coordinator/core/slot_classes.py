"""How the pool's memory is cut into slots.

Slabs of different layers differ in size, a slot has one size. Layers whose slabs need the same
windows form a class with slots of that size; classes are merged upward (the smaller slabs move into
the larger slots) while their slots differ by less than 5 %, and while a class would have fewer than
twice the slots that one token's experts take. The budget is divided so that every class can hold
the same share of its experts. All arithmetic is on integers and ratios of them: the same table and
budget give the same layout everywhere.

This module knows sizes only: no policy, no memory limit, no file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from io_worker.slabs import SlabTable
from shm.pool import PoolLayout, SlotClass

MIN_SLOTS = 2  # one expert is computed while the next is read
MERGE_BELOW = Fraction(
    5, 100
)  # slots that differ by less cost little memory, and shared slots find
# a victim more often; 3 % waste is the aim for slabs of 1 MiB and more, most of it alignment
SLOTS_PER_ACTIVE = 2  # a class below 2 × top-k cannot hold what two tokens in a row use


class PoolTooSmallError(Exception):
    """The pool cannot hold the smallest legal number of slots; `needed_bytes` would do."""

    def __init__(self, needed_bytes: int, found_bytes: int) -> None:
        super().__init__(
            f"pool: expected at least {needed_bytes} bytes "
            f"({MIN_SLOTS} slots of the largest expert), found {found_bytes}; "
            "use a larger --pool or --memory"
        )
        self.needed_bytes = needed_bytes
        self.found_bytes = found_bytes


@dataclass(frozen=True, slots=True)
class _Class:
    """Layers that share slots: their places in the table, and windows that fit all of them."""

    layers: tuple[int, ...]
    n_experts: int
    windows: tuple[int, int, int]
    smallest_slot_bytes: int  # what the smallest of its layers would need alone

    @property
    def slot_bytes(self) -> int:
        return sum(self.windows)


def pool_layout(
    table: SlabTable, n_active: int, pool_bytes: int
) -> tuple[PoolLayout, tuple[int, ...]]:
    """The largest layout within `pool_bytes`, and the class of every layer of the table, in order.

    `n_active` is the number of experts one token uses. Raises `PoolTooSmallError`. There are never
    more slots than experts.
    """
    classes = _merge_similar(_classes(table))
    while True:
        n_slots = _divide(classes, pool_bytes)
        short = _first_short(classes, n_slots, n_active)
        if short is None or len(classes) == 1:
            break
        # the smaller of the two neighbours moves into the slots of the larger
        classes = _merge(classes, min(short, len(classes) - 2))
    needed = smallest_pool_bytes(table)
    if pool_bytes < needed:
        raise PoolTooSmallError(needed, pool_bytes)
    class_of_layer = {place: i for i, cls in enumerate(classes) for place in cls.layers}
    layout = PoolLayout(
        tuple(SlotClass(n, cls.windows) for n, cls in zip(n_slots, classes, strict=True))
    )
    return layout, tuple(class_of_layer[place] for place in range(len(table.layers)))


def smallest_pool_bytes(table: SlabTable) -> int:
    """Bytes of the smallest legal pool: two slots of a single class that fits every layer."""
    classes = _classes(table)
    n_experts = sum(cls.n_experts for cls in classes)
    windows = _largest([cls.windows for cls in classes])
    return PoolLayout((SlotClass(min(MIN_SLOTS, n_experts), windows),)).total_bytes


def whole_pool_bytes(table: SlabTable) -> int:
    """Bytes of the pool that holds every expert: more are never used."""
    classes = _merge_similar(_classes(table))
    return PoolLayout(tuple(SlotClass(cls.n_experts, cls.windows) for cls in classes)).total_bytes


def smallest_layout_bytes(layout: PoolLayout) -> int:
    """What is left of a pool that shrank as far as it may."""
    return layout.header_bytes + sum(
        min(MIN_SLOTS, cls.n_slots) * cls.slot_bytes for cls in layout.classes
    )


def slots_within(layout: PoolLayout, pool_bytes: int) -> tuple[int, ...]:
    """Slots of each class of a pool that shrank to `pool_bytes`: the same share of every class.

    At least the smallest legal number, also where that is more.
    """
    room = max(0, pool_bytes - layout.header_bytes)
    whole = layout.total_bytes - layout.header_bytes
    return tuple(
        max(min(MIN_SLOTS, cls.n_slots), min(cls.n_slots, cls.n_slots * room // whole))
        for cls in layout.classes
    )


def wasted_share(table: SlabTable, layout: PoolLayout, class_of_layer: Sequence[int]) -> float:
    """Share of the slots' bytes that no slab fills, when each layer holds its part of its class."""
    useful = Fraction(0)
    for index, cls in enumerate(layout.classes):
        slabs = [
            layer.slab_bytes
            for layer, at in zip(table.layers, class_of_layer, strict=True)
            if at == index
        ]
        useful += Fraction(cls.n_slots * sum(slabs), len(slabs))
    return float(1 - useful / sum(cls.n_slots * cls.slot_bytes for cls in layout.classes))


def _classes(table: SlabTable) -> list[_Class]:
    """One class per distinct windows, smallest slots first."""
    layers_of: dict[tuple[int, int, int], list[int]] = {}
    for place, layer in enumerate(table.layers):
        layers_of.setdefault(layer.windows, []).append(place)
    return [
        _Class(tuple(layers_of[windows]), len(layers_of[windows]) * table.n_experts, windows, size)
        for size, windows in sorted((sum(windows), windows) for windows in layers_of)
    ]


def _merge_similar(classes: list[_Class]) -> list[_Class]:
    """Merge neighbours while the smallest layer inside loses less than `MERGE_BELOW` to it.

    The loss is counted from the smallest member, so that a chain of small steps cannot add up.
    """
    for index in range(len(classes) - 1):
        both = _union(classes[index], classes[index + 1])
        if both.slot_bytes - both.smallest_slot_bytes < MERGE_BELOW * both.smallest_slot_bytes:
            return _merge_similar(_merge(classes, index))
    return classes


def _merge(classes: list[_Class], index: int) -> list[_Class]:
    """Put class `index` and the next larger one together; smallest slots first again."""
    both = _union(classes[index], classes[index + 1])
    rest = [*classes[:index], *classes[index + 2 :]]
    return sorted([*rest, both], key=lambda cls: (cls.slot_bytes, cls.windows))


def _union(one: _Class, other: _Class) -> _Class:
    return _Class(
        layers=one.layers + other.layers,
        n_experts=one.n_experts + other.n_experts,
        windows=_largest([one.windows, other.windows]),
        smallest_slot_bytes=min(one.smallest_slot_bytes, other.smallest_slot_bytes),
    )


def _largest(windows: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    return (
        max(gate for gate, _, _ in windows),
        max(up for _, up, _ in windows),
        max(down for _, _, down in windows),
    )


def _divide(classes: Sequence[_Class], pool_bytes: int) -> list[int]:
    """Slots of each class: the same share of its experts in every class, then what still fits."""
    whole = [cls.n_experts for cls in classes]
    if _total_bytes(classes, whole) <= pool_bytes:
        return whole
    # the header array is charged for all experts here; the second step gives back what that lost
    room = max(0, pool_bytes - PoolLayout((SlotClass(sum(whole), (0, 0, 0)),)).header_bytes)
    share = Fraction(room, sum(cls.n_experts * cls.slot_bytes for cls in classes))
    n_slots = [min(cls.n_experts, int(share * cls.n_experts)) for cls in classes]
    growing = True
    while growing:
        growing = False
        # the class that is furthest behind first
        for index in sorted(range(len(classes)), key=lambda i: Fraction(n_slots[i], whole[i])):
            more = [n + (i == index) for i, n in enumerate(n_slots)]
            if n_slots[index] < whole[index] and _total_bytes(classes, more) <= pool_bytes:
                n_slots, growing = more, True
                break
    return n_slots


def _total_bytes(classes: Sequence[_Class], n_slots: Sequence[int]) -> int:
    return PoolLayout(
        tuple(SlotClass(n, cls.windows) for n, cls in zip(n_slots, classes, strict=True))
    ).total_bytes


def _first_short(classes: Sequence[_Class], n_slots: Sequence[int], n_active: int) -> int | None:
    """The smallest class with too few slots for two tokens, unless it holds all its experts."""
    for index, (cls, n) in enumerate(zip(classes, n_slots, strict=True)):
        if n < min(SLOTS_PER_ACTIVE * n_active, cls.n_experts):
            return index
    return None
