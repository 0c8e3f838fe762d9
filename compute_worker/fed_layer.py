"""The layer that compute is being fed: what is on its way to it, and where its time goes.

Plain bookkeeping of one layer of one step; see `feed` for what happens with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shm.messages import Grant, Location, ReadSpan, SlabNotice


@dataclass(slots=True)
class Waiting:
    """Nanoseconds of one step that compute spent waiting, by reason."""

    disk_ns: int = 0
    coordination_ns: int = 0


@dataclass(slots=True)
class FedLayer:
    """`on_the_way` by slot: granted, to be used from its notice on."""

    layer: int
    since_ns: int  # compute waits since
    on_the_way: dict[int, Location] = field(default_factory=dict)
    n_waiting: int = 0  # as the last grant said
    stands: bool = False  # what came last needs no release
    lasts: bool = False  # what comes is granted beyond the layer
    waits: list[tuple[int, int]] = field(default_factory=list)
    reads: list[ReadSpan] = field(default_factory=list)

    def granted(self, grant: Grant) -> None:
        """What came without a notice, or comes again, is not on its way any more."""
        self.stands, self.n_waiting = grant.standing, grant.n_waiting
        self.lasts = self.lasts or grant.lasting
        self.reads.extend(grant.reads)
        for location in grant.locations:
            self.on_the_way.pop(location.lease.slot, None)
        self.on_the_way |= {location.lease.slot: location for location in grant.on_the_way}

    def landed(self, slots: Iterable[int], noticed: Mapping[int, SlabNotice]) -> list[Location]:
        """Of these slots, what was on its way and is there now; `noticed` by slot."""
        landed = []
        for slot in slots:
            location, notice = self.on_the_way.get(slot), noticed.get(slot)
            if location is not None and notice is not None and notice.lease == location.lease:
                del self.on_the_way[slot]
                self.reads.append(notice.span)
                landed.append(location)
        return landed

    def end_wait(self, now_ns: int) -> None:
        """Something came that can be computed, or may be; what is waited for next is from now."""
        self.waits.append((self.since_ns, now_ns))
        self.since_ns = now_ns

    def account(self, waiting: Waiting) -> None:
        """Split the waits: disk while one of the layer's reads was under way, else coordination."""
        merged: list[tuple[int, int]] = []
        for span in sorted(self.reads, key=lambda span: span.start_ns):
            if merged and span.start_ns <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], span.stop_ns))
            else:
                merged.append((span.start_ns, span.stop_ns))
        for start, stop in self.waits:
            disk = sum(max(0, min(stop, b) - max(start, a)) for a, b in merged)
            waiting.disk_ns += disk
            waiting.coordination_ns += stop - start - disk
