"""Makes the pool smaller and larger while it is in use. Part of the decision core: no I/O.

A smaller pool first gives up free slots, then those of the policy's victims. What is given up is
retired, and its memory goes back to the system (`PunchSlots`); a slot in use or being filled never
is. What cannot go now goes with a later event. Standing grants end before a slot of their layers
goes, and because compute uses them without telling, nothing of such a layer goes before the step
that was running then is over. Layers that compute has in memory of its own end one by one, as many
as make room; their slots are free when it says that they are gone. Where compute uses experts
without asking, victims go only between two steps, or while it waits (`may_evict`). How large the
pool should be is decided elsewhere (`pressure`).
"""

from coordinator.core.actions import Action, PunchSlots, RestoreSlots, ToCompute, ToWorker
from coordinator.core.adoption import LEAST_SLOTS, Adoption
from coordinator.core.geometry import PoolGeometry, ResizeCounters
from coordinator.core.grants import Grants
from coordinator.core.placement import Placement
from coordinator.core.reads import ReadDispatch
from shm.messages import Revoke, SlotsPunched


class Resizing:
    """Takes slots out of use and puts them back until classes have as many as is wanted."""

    def __init__(
        self,
        geometry: PoolGeometry,
        placement: Placement,
        grants: Grants,
        adoption: Adoption,
        reads: ReadDispatch,
        counters: ResizeCounters,
        *,
        asks_first: bool,
    ) -> None:
        self._placement = placement
        self._slots = placement.slots
        self._grants = grants
        self._adoption = adoption
        self._reads = reads
        self._counters = counters
        self._asks_first = asks_first
        self._wanted = geometry.slots_of_class
        self._in_use: set[int] = set()  # layers that stood when the running step began

    def aim(self, slots_of_class: tuple[int, ...], now: int, *, is_stepping: bool) -> list[Action]:
        """Use so many slots of each class from now on, as far as that can be done now."""
        actions: list[Action] = []
        if slots_of_class != self._wanted:
            self._wanted = slots_of_class
            self._placement.resize(slots_of_class, now)
            stays = self._adoption.stays(slots_of_class)
            revoked = self._grants.resize(slots_of_class, stays)
            if revoked:
                self._adoption.revoke(revoked)
                actions.append(ToCompute(Revoke(revoked)))
            if is_stepping:
                self._in_use.update(revoked)
        return actions + self._restore() + self.more_is_free(is_stepping=is_stepping)

    def may_evict(self) -> list[Action]:
        """A step waits for its layer's experts, which are all in use: others may go."""
        return self._retire() if self._asks_first else []

    def step_over(self) -> list[Action]:
        """No step runs: nothing is used without telling any more."""
        self._in_use.clear()
        return self._retire()

    def more_is_free(self, *, is_stepping: bool) -> list[Action]:
        """Compute is done with slots: some may have to go."""
        return self._retire(only_free=is_stepping and self._asks_first)

    def _retire(self, *, only_free: bool = False) -> list[Action]:
        gone: list[int] = []
        for slot_class, n_usable in enumerate(self._slots.usable_of_class()):
            # while adopted slots are still to come free, a step must find some of the others
            n_spare = n_usable - self._slots.n_adopted(slot_class) - LEAST_SLOTS
            for _ in range(min(n_usable - self._wanted[slot_class], n_spare)):
                if only_free:
                    slot = self._slots.take_free(slot_class)
                else:
                    in_use = self._in_use | self._adoption.moving
                    slot = self._placement.give_up(slot_class, in_use)
                if slot is None:
                    break
                self._slots.retire(slot)
                gone.append(slot.number)
        if not gone:
            return []
        self._counters.shrinks += 1
        self._counters.slots_retired += len(gone)
        punched = SlotsPunched(tuple(gone))
        return [PunchSlots(punched.slots), *[ToWorker(name, punched) for name in self._reads.names]]

    def _restore(self) -> list[Action]:
        back = [
            self._slots.restore(slot_class).number
            for slot_class, n_usable in enumerate(self._slots.usable_of_class())
            for _ in range(self._wanted[slot_class] - n_usable)
        ]
        if not back:
            return []
        self._counters.grows += 1
        self._counters.slots_restored += len(back)
        return [RestoreSlots(tuple(back))]

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        self._adoption.check()
        for n_usable, n_wanted in zip(self._slots.usable_of_class(), self._wanted, strict=True):
            assert n_usable >= n_wanted, (n_usable, n_wanted)
