"""Moves experts that stay for good from the pool into compute's own memory, a part at a time.

Part of the decision core: no I/O. Anonymous memory with huge pages may be read faster than the pool
(compute measures it at its start). Then compute copies the experts of a layer that stands, and the
memory of their slots goes back to the system:

    Grant (standing)   the layer, once it is whole, between two steps
    Adopt              some of its experts;   their slots: READY -> ADOPTED
    Adopted            their slots' memory goes back (`VacateSlots`), and the next part follows
    Revoke, Dropped    what compute has of the layer is gone;   its slots: ADOPTED -> FREE

Rules to keep: one part is under way at a time, so that memory is held twice for no more than
`PoolGeometry.part_bytes`; nothing is adopted while a step runs, which may use what it was granted.
"""

from collections.abc import Sequence

from coordinator.core.actions import Action, ToCompute, ToWorker, VacateSlots
from coordinator.core.geometry import PoolGeometry
from coordinator.core.grants import Grants
from coordinator.core.placement import Placement
from coordinator.core.reads import ReadDispatch
from coordinator.core.slots import RESIDENT, Key, Slot, SlotState
from shm.messages import Adopt, Adopted, Dropped, SlotsPunched

# When the pool shrinks, the layers that compute does not have keep slots for half of their experts,
# and at least so many: fewer would cost more misses than another layer that is given up.
SHARE_OF_THE_OTHERS, LEAST_SLOTS = 2, 2

Moved = Adopted | Dropped


class Adoption:
    """Which layers compute has, and the part that is under way."""

    def __init__(
        self, geometry: PoolGeometry, placement: Placement, grants: Grants, reads: ReadDispatch
    ) -> None:
        self._geometry = geometry
        self._placement = placement
        self._grants = grants
        self._reads = reads
        self._is_on = False
        self._part: list[Slot] = []
        self._whole: set[int] = set()  # layers that compute has, every expert
        self._leaving: set[int] = set()  # revoked: compute has not said yet that they are gone

    def compute_ready(self, *, adopts: bool) -> None:
        """Compute is up; whether its own memory is worth it."""
        self._is_on = adopts

    def next_part(self) -> list[Action]:
        """No step runs: have the next experts adopted, if there are any and none is under way."""
        layer = None if self._part else self._next_layer()
        if layer is None:
            return []
        grant = self._grants.stand(layer)
        ready = [s for s in self._slots_of(layer) if s.state is SlotState.READY]
        self._part = ready[: self._n_experts_at_once(layer)]
        locations = self._grants.locations_of(self._part)
        for slot in self._part:
            self._placement.adopt(slot)
        standing = [] if grant is None else [ToCompute(grant)]
        return [*standing, ToCompute(Adopt(layer, locations))]

    def handle(self, moved: Moved, now: int) -> tuple[list[Action], list[Key]]:
        """Compute has the part that was under way, or layers that it had are gone; returns what to
        read because layers may stand again."""
        if isinstance(moved, Adopted):
            return self._adopted(moved, now), []
        gone = self._leaving.intersection(moved.layers) - self.moving
        self._leaving -= gone  # who goes wrong names layers that it was not told to give up
        for layer in sorted(gone):
            self._drop(layer)
        return [], self._grants.lacking()

    def _adopted(self, adopted: Adopted, now: int) -> list[Action]:
        if adopted.layer not in self.moving:
            return []  # who goes wrong tells of what nobody asked
        part, self._part = self._part, []
        if not adopted.has_copies:
            self._is_on = False
            for slot in part:
                self._placement.keep(slot, now)
            return []
        states = [slot.state for slot in self._slots_of(adopted.layer)]
        is_whole = states.count(SlotState.ADOPTED) == self._geometry.n_experts
        if is_whole and adopted.layer not in self._leaving:
            self._whole.add(adopted.layer)
        vacated = tuple(slot.number for slot in part)
        told = [ToWorker(name, SlotsPunched(vacated)) for name in self._reads.names]
        return [VacateSlots(vacated), *told]

    @property
    def moving(self) -> set[int]:
        """The layer that compute looks at now, though no step runs: nothing of it may go."""
        return {slot.key[0] for slot in self._part if slot.key is not None}

    def stays(self, slots_of_class: Sequence[int]) -> set[int]:
        """Layers that compute may keep when the classes have so many slots."""
        n_experts = self._geometry.n_experts
        kept: set[int] = set()
        for slot_class, n_slots in enumerate(slots_of_class):
            layers = [x for x, own in self._geometry.class_of_layer.items() if own == slot_class]
            mine = sorted(self._whole.intersection(layers))
            while mine:
                n_others = len(layers) - len(mine)
                least = max(LEAST_SLOTS, n_others * n_experts // SHARE_OF_THE_OTHERS)
                if n_slots - len(mine) * n_experts >= (least if n_others else 0):
                    break
                mine.pop()
            kept.update(mine)
        return kept

    def revoke(self, layers: Sequence[int]) -> None:
        """Compute is told to give these up."""
        self._whole.difference_update(layers)
        self._leaving.update(layers)

    def compute_died(self) -> list[Key]:
        """All is gone, and what was granted for good; returns what compute had."""
        self._grants.forget_standing()
        self._is_on = False
        self._part = []
        self._whole.clear()
        self._leaving.clear()
        return [key for layer in sorted(self._geometry.class_of_layer) for key in self._drop(layer)]

    @property
    def n_to_move(self) -> int:
        """Experts under way, or of the layer whose turn it is."""
        layer = self._next_layer()
        return len(self._part) or (0 if layer is None else self._geometry.n_experts)

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        assert all(slot.state is SlotState.ADOPTED for slot in self._part)
        assert self._whole <= self._grants.standing
        assert not self._whole & self._leaving
        for layer in self._whole:
            assert all(slot.state is SlotState.ADOPTED for slot in self._slots_of(layer))

    def _next_layer(self) -> int | None:
        """The first that may stand, is whole, and is not with compute yet."""
        if not self._is_on:
            return None
        layers = sorted(self._grants.may_stand - self._whole - self._leaving)
        return next((layer for layer in layers if self._is_there(layer)), None)

    def _is_there(self, layer: int) -> bool:
        find = self._placement.slots.find
        for expert in range(self._geometry.n_experts):
            slot = find((layer, expert))
            if slot is None or slot.pins or slot.state not in RESIDENT:
                return False
        return True

    def _slots_of(self, layer: int) -> list[Slot]:
        found = [self._placement.slots.find((layer, e)) for e in range(self._geometry.n_experts)]
        return [slot for slot in found if slot is not None]

    def _n_experts_at_once(self, layer: int) -> int:
        slab_bytes = sum(n_bytes for _, _, n_bytes in self._geometry.ranges_of(layer, 0))
        return max(1, self._geometry.part_bytes // slab_bytes)

    def _drop(self, layer: int) -> list[Key]:
        gone = [slot for slot in self._slots_of(layer) if slot.state is SlotState.ADOPTED]
        keys = [slot.key for slot in gone if slot.key is not None]
        for slot in gone:
            self._placement.drop(slot)
        return keys
