"""Reads that wait for a reader and reads that are under way: who reads what, and what an answer
is worth. Part of the decision core: no I/O, no clock.

A reader holds at most `credit` slabs, so that a death loses little and no socket queue fills. What
a layer waits for is read before what is read ahead of time, whoever was queued first. Nothing that
is decided about slots depends on this order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from coordinator.core.actions import Action, ToWorker
from shm.messages import ReadSlabs, SlabRead, SlotLease


@dataclass(slots=True)
class _Reader:
    credit: int
    is_condemned: bool = False  # gets no more
    reading: dict[int, SlabRead] = field(default_factory=dict)  # by slot


class ReadDispatch:
    """The queue of reads and the readers that take from it."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._queue: deque[SlabRead] = deque()  # somebody waits for these
        self._ahead: deque[SlabRead] = deque()  # nobody does: they come after all others
        self._used: dict[SlotLease, str] = {}  # compute had them before we heard: of which reader
        self._unheard: set[SlotLease] = set()  # of these a compute worker may hear that is dead

    @property
    def n_loading(self) -> int:
        """Reads that are queued, or that some reader has and has not answered."""
        n_queued = len(self._queue) + len(self._ahead)
        return n_queued + sum(len(reader.reading) for reader in self._readers.values())

    @property
    def names(self) -> list[str]:
        """The readers there are."""
        return list(self._readers)

    def under_way(self, name: str) -> list[SlabRead]:
        """What one reader was told to read and has not answered."""
        return list(self._readers[name].reading.values()) if name in self._readers else []

    def add_reader(self, name: str, credit: int) -> None:
        """A reader takes up to `credit` slabs at once."""
        self._readers[name] = _Reader(credit)

    def condemn_reader(self, name: str) -> list[SlabRead]:
        """A reader gets no more reads; returns what it has not answered, once."""
        reader = self._readers.get(name)
        if reader is None or reader.is_condemned:
            return []
        reader.is_condemned = True
        return list(reader.reading.values())

    def remove_reader(self, name: str) -> list[SlabRead]:
        """A reader is gone; returns what it leaves unanswered."""
        reader = self._readers.pop(name, None)
        self._used = {lease: own for lease, own in self._used.items() if own != name}
        left = list(reader.reading.values()) if reader else []
        self._unheard.difference_update(read.lease for read in left)
        return left

    def demand(self, slots_of: Callable[[], Set[int]], reads: Iterable[SlabRead]) -> None:
        """A layer waits for what is read into these slots, and for nothing else: what is queued of
        it comes first, then `reads`, which are new. Mostly nothing is queued: then the slots are
        not asked for, since the disk idles until this is over."""
        if self._queue or self._ahead:
            slots = slots_of()
            queued = (*self._queue, *self._ahead)
            self._queue = deque(read for read in queued if read.lease.slot in slots)
            self._ahead = deque(read for read in queued if read.lease.slot not in slots)
        self._queue.extend(reads)

    def push(self, reads: Iterable[SlabRead]) -> None:
        """Queue reads that the layer waits for, too."""
        self._queue.extend(reads)

    def push_ahead(self, reads: Iterable[SlabRead]) -> None:
        """Queue reads that nobody waits for, behind all others."""
        self._ahead.extend(reads)

    def push_front(self, reads: list[SlabRead]) -> None:
        """Queue reads before all others, in their order."""
        self._queue.extendleft(reversed(reads))

    def dispatch(self) -> list[Action]:
        """Hand queued reads to readers with credit, the least busy first."""
        batches: dict[str, list[SlabRead]] = {}
        while self._queue or self._ahead:
            free = [
                (len(reader.reading), name)
                for name, reader in self._readers.items()
                if len(reader.reading) < reader.credit and not reader.is_condemned
            ]
            if not free:
                break
            name = min(free)[1]
            read = (self._queue or self._ahead).popleft()
            self._readers[name].reading[read.lease.slot] = read
            batches.setdefault(name, []).append(read)
        return [ToWorker(name, ReadSlabs(tuple(reads))) for name, reads in batches.items()]

    def answered(self, name: str, lease: SlotLease) -> bool:
        """Strike a read off; False for an answer that is late, double or nobody asked for."""
        reader = self._readers.get(name)
        told = reader.reading.get(lease.slot) if reader else None
        if reader is None or told is None or told.lease != lease:
            return False
        del reader.reading[lease.slot]
        self._unheard.discard(lease)
        return True

    def compute_died(self) -> None:
        """Who comes after it never hears what the readers told it of reads that are under way."""
        for reader in self._readers.values():
            self._unheard.update(read.lease for read in reader.reading.values())

    def compute_hears_of(self, lease: SlotLease) -> bool:
        """Whether the reader's notice reaches the compute worker that runs."""
        return lease not in self._unheard

    @property
    def n_used(self) -> int:
        """Reads that are over, and whose answers are still on their way."""
        return len(self._used)

    def used(self, lease: SlotLease) -> int:
        """Strike off a read that compute knows to be over, and expect its answer all the same;
        returns the bytes of the slab."""
        n_bytes = 0
        for name, reader in self._readers.items():
            told = reader.reading.get(lease.slot)
            if told is not None and told.lease == lease:
                del reader.reading[lease.slot]
                self._used[lease] = name
                n_bytes = sum(each.n_bytes for each in told.ranges)
        return n_bytes

    def was_used(self, name: str, lease: SlotLease) -> bool:
        """Whether this answer is the one that was still expected."""
        if self._used.get(lease) != name:
            return False
        del self._used[lease]
        return True

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        for name, reader in self._readers.items():
            assert len(reader.reading) <= reader.credit, name
