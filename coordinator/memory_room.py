"""Watches how much memory may still be taken, often and cheaply.

All cgroups are walked once a second (0.3 ms of the processor, see `available_memory`); in between
only the one that left least. Its limit less its usage is a lower bound of the room that costs a
microsecond, since page cache is counted as used; where the bound is not enough, the group is looked
at exactly. Without a limit by a cgroup there is only what the system has, once a second.
"""

import os
from pathlib import Path

from coordinator.available_memory import LimitedGroup, available_memory

WALK_SECONDS = 1.0


class MemoryRoom:
    """Keeps one file open until it is closed."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.source = ""
        self._root = root
        self._room_bytes = 0  # of the last walk
        self._limit_bytes = 0
        self._group: LimitedGroup | None = None
        self._usage_fd: int | None = None
        self._next_walk = 0.0

    def close(self) -> None:
        """Close what it keeps open."""
        self._follow(None)

    @property
    def is_limited(self) -> bool:
        """Whether a cgroup's limit is what counts: then there may be none left in a moment."""
        return self._group is not None

    def look(self, now_seconds: float, enough_bytes: int) -> int:
        """Bytes of room now: exact below `enough_bytes`, else perhaps less than there is."""
        if now_seconds < self._next_walk:
            if self._group is None or self._usage_fd is None:
                return self._room_bytes
            try:
                bound = self._limit_bytes - int(os.pread(self._usage_fd, 32, 0))
                exact = bound if bound >= enough_bytes else self._group.room_bytes()
            except (OSError, ValueError):
                exact = None  # the group is gone
            if exact is not None:
                return exact
        return self._walk(now_seconds)

    def _walk(self, now_seconds: float) -> int:
        self._next_walk = now_seconds + WALK_SECONDS
        found = available_memory(self._root)
        self._follow(found.group)
        self.source = found.source
        self._room_bytes = found.n_bytes
        return found.n_bytes

    def _follow(self, group: LimitedGroup | None) -> None:
        try:
            limit = group.limit_bytes() if group is not None else None
            if group == self._group and limit is not None:
                self._limit_bytes = limit
                return
            if self._usage_fd is not None:
                os.close(self._usage_fd)
            self._usage_fd = self._group = None
            if group is not None and limit is not None:
                self._usage_fd = os.open(group.usage_file, os.O_RDONLY | os.O_CLOEXEC)
                self._group, self._limit_bytes = group, limit
        except (OSError, ValueError):
            self._group = None  # gone since: the next walk finds another
