"""Whether a process that died is started again: not where it said why it cannot run, not where the
first of its name never was ready, and not without end.

Pure bookkeeping: the loop brings deaths and the time. Per process, so that many workers killed at
once are many first deaths, not a storm.
"""

from collections import Counter, deque

from coordinator.processes.children import Died

EXIT_INTERNAL = 5
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

    def refusal(self, death: Died, now_ns: int) -> tuple[int, str] | None:
        """Note a death; the exit code and why, where another start is not worth a try."""
        child, name = death.child, death.child.name
        exit_code = child.failure[0] if child.failure else EXIT_INTERNAL
        if exit_code != EXIT_INTERNAL or (self.is_first(name) and not child.is_ready):
            return exit_code, death.why
        if not self.allowed(name, now_ns):
            text = f"died more than {MAX_DEATHS} times within a minute, last: {death.why}"
            return EXIT_INTERNAL, f"{text}; not started again"
        return None

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
