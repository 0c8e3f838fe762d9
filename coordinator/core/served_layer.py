"""The layer whose `Need` is being served: what it still waits for. Plain bookkeeping."""

from collections import Counter
from dataclasses import dataclass, field

from coordinator.core.placement import Queues
from coordinator.core.slots import Slot
from shm.messages import ExpertUse, Need, ReadSpan, SlabsReady, SlotLease

Arrival = tuple[Slot, ReadSpan]  # a slab that was read, and when


@dataclass(slots=True)
class ServedLayer:
    """`missing` experts are being read; those in `takes_over` follow another into its slot. `rest`
    are read with them though nobody asked; then nothing that was read counts before all is there.
    """

    need: Need
    missing: set[int] = field(default_factory=set)
    rest: set[int] = field(default_factory=set)
    held: list[Arrival] = field(default_factory=list)  # read, waiting for the rest
    takes_over: Queues = field(default_factory=dict)
    n_waiting: int = 0  # experts in `takes_over`
    on_the_way: frozenset[SlotLease] = frozenset()  # granted with the hits: a notice is enough
    times_lost: Counter[int] = field(default_factory=Counter)  # by expert, of granted slots

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of a prompt are among those that need these experts."""
        return any(use.n_recent_tokens for use in self.need.experts)

    def uses_in_order(self) -> list[ExpertUse]:
        """Those that recent tokens use most come last: they stay longest."""
        return sorted(self.need.experts, key=lambda use: (use.n_recent_tokens, use.expert))

    def in_waves(self) -> list[tuple[int, int]]:
        """The experts of a layer in which one follows another into its slot."""
        uses = self.need.experts if self.n_waiting else ()
        return [(self.need.layer, use.expert) for use in uses]

    def needs(self, expert: int) -> bool:
        """Whether the layer asked for it."""
        return any(use.expert == expert for use in self.need.experts)

    def arrived(self, slot: Slot, ready: SlabsReady) -> list[Arrival]:
        """A slab of this layer is there; returns what may be granted because of it."""
        assert slot.key is not None
        expert, span = slot.key[1], ReadSpan(ready.start_ns, ready.stop_ns)
        if expert in self.missing:
            self.missing.remove(expert)
            self.held.append((slot, span))
        elif expert in self.rest:  # what is held counts as read when all of its layer is there
            self.held = [
                (held, ReadSpan(own.start_ns, max(own.stop_ns, span.stop_ns)))
                for held, own in self.held
            ]
        return self.without(expert)

    def without(self, expert: int) -> list[Arrival]:
        """An expert that nobody asked for is there, or will never be."""
        self.rest.discard(expert)
        if self.rest:
            return []
        granted, self.held = self.held, []
        return granted

    def hears_of(self, ready: SlabsReady) -> bool:
        """Whether compute needs no grant for this: its reader told it, and it knew the place."""
        return ready.noticed and ready.lease in self.on_the_way

    def next_into(self, slot: Slot) -> int | None:
        """The expert that takes over a slot which is free now; it is missing from here on."""
        waiting = self.takes_over.get(slot.number)
        if not waiting:
            return None
        expert = waiting.popleft()
        self.n_waiting -= 1
        self.missing.add(expert)
        return expert
