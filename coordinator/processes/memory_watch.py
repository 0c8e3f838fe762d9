"""The memory of a run while it runs: what it takes, what is left, and how large its pool may be.

Brings together what is measured (`accounting`, `memory_room`) and what is judged (`pressure`), at
the moments when it is due. Decides nothing about slots: it says how many of each class there may be
(`PoolTarget`), and gives and takes the memory of those that the core names.
"""

from collections.abc import Iterable
from pathlib import Path

from coordinator.core.actions import PunchSlots, RestoreSlots, SlotMemory, VacateSlots
from coordinator.core.pressure import MUCH_TAKEN_BYTES, Pressure
from coordinator.core.slot_classes import slots_within, smallest_layout_bytes
from coordinator.core.state import PoolTarget
from coordinator.processes.accounting import private_bytes
from coordinator.processes.library_pages import drop_unused_pages
from coordinator.processes.memory_room import MemoryRoom
from coordinator.processes.pool_memory import PoolMemory
from shm.pool import PoolLayout

ACCOUNT_SECONDS = 0.1  # costs 20 us of the processor per process
# A look at a cgroup with a limit is due before somebody who takes so much per second can have come
# from where the room is now to where the pool must shrink. An idle loop that looks 20 times in a
# second takes 1 % of a core, a busy one next to nothing.
FASTEST_BYTES_PER_SECOND = 1 << 30
SHORTEST_SECONDS, LONGEST_SECONDS = 0.02, 1.0  # the longest is for what the whole system has, too
MiB = 1024 * 1024


class MemoryWatch:
    """Of one run. Without a pool (`pool_fd` None) it only counts."""

    def __init__(
        self, pool_fd: int | None, layout: PoolLayout, budget_bytes: int, root: Path = Path("/")
    ) -> None:
        self.accounted_bytes = self.peak_bytes = 0
        self._pool = PoolMemory(pool_fd, layout) if pool_fd is not None else None
        self._layout = layout
        self._budget_bytes = budget_bytes
        self._room = MemoryRoom(root)
        self._pressure: Pressure | None = None
        self._private_bytes = 0  # of all processes when they were counted last
        self._left_bytes = 0  # at the last look: room, and what is ours
        self._next_account = self._next_look = 0.0
        self._short_since: float | None = None
        self._lines: list[str] = []

    @property
    def full_bytes(self) -> int:
        """Memory of the whole pool."""
        return self._layout.total_bytes if self._pool else 0

    @property
    def pool_bytes(self) -> int:
        """Memory that the pool holds now."""
        return self._pool.n_bytes if self._pool else 0

    def seconds_until_due(self, now_seconds: float) -> float:
        """Until `look` has something to do."""
        return max(0.0, self._next_look - now_seconds) if self._pressure else LONGEST_SECONDS

    def account(self, pids: Iterable[int], now_seconds: float) -> None:
        """Count what all processes hold, if that is due."""
        if now_seconds >= self._next_account:
            self._next_account = now_seconds + ACCOUNT_SECONDS
            self._count(pids)

    def begin(self, pids: Iterable[int], now_seconds: float) -> None:
        """Everything is loaded: from now on the pool follows the room there is."""
        if self._pool is None or self._pressure is not None:
            return
        pids = list(pids)
        self._room.look(now_seconds)
        if self._room.is_limited:  # elsewhere they do no harm, and the next start wants them
            drop_unused_pages(pids)
        self._count(pids)
        room = self._room.look(now_seconds)
        self._left_bytes = room + self.accounted_bytes
        layout = self._layout
        smallest, unit = smallest_layout_bytes(layout), sum(c.slot_bytes for c in layout.classes)
        spare = room - max(0, self._budget_bytes - self.accounted_bytes)
        self._pressure = Pressure(layout.total_bytes, smallest, unit, spare)

    def look(self, pids: Iterable[int], now_seconds: float) -> PoolTarget | None:
        """What the pool should be now, if that is due and not what it is."""
        if self._pressure is None or self._pool is None or now_seconds < self._next_look:
            return None
        room = self._room.look(now_seconds)
        self._next_look = now_seconds + self._interval(room)
        own = self._private_bytes + self._pool.n_bytes
        if abs(self._left_bytes - (room + own)) >= MUCH_TAKEN_BYTES:
            self._count(pids)  # it may be ourselves who took it, or one of us that died and left it
            own = self._private_bytes + self._pool.n_bytes
        self._left_bytes = room + own
        target = self._pressure.target(room, self._pool.usable_bytes, own, now_seconds)
        if target is None:
            return None
        self._tell(room, target, now_seconds)
        return PoolTarget(slots_within(self._layout, target))

    def perform(self, action: SlotMemory) -> None:
        """Give or take the memory of slots."""
        assert self._pool is not None
        match action:
            case PunchSlots(slots):
                self._pool.punch(slots)
            case VacateSlots(slots):
                self._pool.vacate(slots)
            case RestoreSlots(slots):
                self._pool.restore(slots)

    def take_lines(self) -> list[str]:
        """What an operator wants to know since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _count(self, pids: Iterable[int]) -> None:
        self._private_bytes = sum(map(private_bytes, pids))
        self.accounted_bytes = self._private_bytes + self.pool_bytes
        self.peak_bytes = max(self.peak_bytes, self.accounted_bytes)

    def _interval(self, room: int) -> float:
        assert self._pressure is not None
        if not self._room.is_limited:
            return LONGEST_SECONDS
        seconds = (room - self._pressure.low_bytes) / FASTEST_BYTES_PER_SECOND
        return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, seconds))

    def _tell(self, room: int, target: int, now_seconds: float) -> None:
        assert self._pool is not None
        usable_bytes = self._pool.usable_bytes
        figures = f"room_mib={room // MiB} pool_mib={usable_bytes // MiB}"
        if target < usable_bytes:
            if self._short_since is None:
                self._short_since = now_seconds
                self._lines.append(f"event=pool_shrinks {figures} limit={self._room.source!r}")
        elif self._short_since is not None and target >= self.full_bytes:
            seconds = now_seconds - self._short_since
            self._lines.append(f"event=pool_restored {figures} after_seconds={seconds:.1f}")
            self._short_since = None
