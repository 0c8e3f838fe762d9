"""Watches how much memory may still be taken.

All cgroups are walked once a second (0.3 ms of the processor, see `available_memory`), in between
only the one that left least (0.1 ms). Without a limit by a cgroup there is only what the system
has, once a second.

Page cache in active use is no room here: it is the programs' own code above all, and the kernel is
slow to take it while memory gets short.
"""

from pathlib import Path

from coordinator.processes.available_memory import LimitedGroup, available_memory

WALK_SECONDS = 1.0
FREE = ("inactive_file",)  # page cache that counts as room


class MemoryRoom:
    """The room of this process; `root` is where `proc` and `sys` lie."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.source = ""
        self._root = root
        self._room_bytes = 0  # of the last walk
        self._group: LimitedGroup | None = None
        self._next_walk = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether a cgroup's limit is what counts: then there may be none left in a moment."""
        return self._group is not None

    def look(self, now_seconds: float) -> int:
        """Bytes of room now; less than 0 where active page cache would have to go."""
        if now_seconds >= self._next_walk:
            self._next_walk = now_seconds + WALK_SECONDS
            found = available_memory(self._root)
            self.source, self._group, self._room_bytes = found.source, found.group, found.n_bytes
        room = _room_of(self._group) if self._group is not None else None
        return self._room_bytes if room is None else room


def _room_of(group: LimitedGroup) -> int | None:
    """None for a group that is gone: the next walk finds another."""
    try:
        return group.room_bytes(FREE)
    except (OSError, ValueError):
        return None
