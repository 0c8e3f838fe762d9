"""Whether a process that died is started again: not without end.

Pure bookkeeping: the loop brings deaths and the time. Per process, so that many workers killed at
once are many first deaths, not a storm.
"""

from collections import Counter, deque

MAX_DEATHS = 5  # of one process within the window
WINDOW_NS = 60_000_000_000


class Restarts:
    """Deaths of every process, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # starts after the first
        self._deaths: dict[str, deque[int]] = {}

    def is_first(self, name: str) -> bool:
        """Whether the process was never started again."""
        return self.counts[name] == 0

    def allowed(self, name: str, now_ns: int) -> bool:
        """Note a death; whether another start is worth a try."""
        deaths = self._deaths.setdefault(name, deque())
        deaths.append(now_ns)
        while deaths[0] <= now_ns - WINDOW_NS:
            deaths.popleft()
        if len(deaths) > MAX_DEATHS:
            return False
        self.counts[name] += 1
        return True
