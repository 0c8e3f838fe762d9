"""Judges whether a living process hangs, by progress and never by time alone.

Pure bookkeeping: the loop brings observations, this says who makes no progress. A process that is
merely slow (a disk of 2 s per read) makes progress in its kernel I/O counters.
"""

from dataclasses import dataclass

IO_HANG_NS = 3_000_000_000  # no read finished and no kernel I/O progress for so long
COMPUTE_HANG_NS = 30_000_000_000  # and at least 20 times its slowest step part so far
COMPUTE_HANG_FACTOR = 20
# Without a compiler one layer of a long prompt takes a minute and more: as long as compute uses the
# processor it is given so much time before it counts as an endless loop.
COMPUTE_BUSY_NS = 600_000_000_000
HTTP_HANG_NS = 30_000_000_000  # its event loop sends a heartbeat twice a second
START_HANG_NS = 120_000_000_000  # dense weights of a large model from a slow disk: by progress too
# The loop looks twice a second. When it did not for so long it was stopped itself, or kept from its
# core: by Ctrl-Z, a container that was paused, a busy machine. So were the others, most likely.
MAX_GAP_NS = 2_000_000_000


@dataclass(slots=True)
class _Seen:
    """Last observation that differed from the one before, and when."""

    figures: tuple[int, ...]
    since_ns: int


class Watch:
    """Last progress of every process, by name."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._slowest_ns: dict[str, int] = {}
        self._last_look_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Before the observations of a turn: time in which nobody looked counts for nobody."""
        last_ns, self._last_look_ns = self._last_look_ns, now_ns
        if last_ns is not None and now_ns - last_ns > MAX_GAP_NS:
            for seen in self._seen.values():
                seen.since_ns = min(now_ns, seen.since_ns + now_ns - last_ns)

    def begin(self, name: str, now_ns: int) -> None:
        """A new process, or a new phase of its life: what was slow before counts no more."""
        self._seen[name] = _Seen((), now_ns)
        self._slowest_ns.pop(name, None)

    def forget(self, name: str) -> None:
        """The process is gone."""
        self._seen.pop(name, None)
        self._slowest_ns.pop(name, None)

    def observe(self, name: str, figures: tuple[int, ...], now_ns: int) -> None:
        """Counters of a process; any change is progress."""
        seen = self._seen.get(name)
        if seen is None:
            self._seen[name] = _Seen(figures, now_ns)
        elif seen.figures != figures:
            self._slowest_ns[name] = max(self._slowest_ns.get(name, 0), now_ns - seen.since_ns)
            self._seen[name] = _Seen(figures, now_ns)

    def rest(self, name: str, now_ns: int) -> None:
        """The process has nothing to do: waiting is no hang."""
        seen = self._seen.get(name)
        if seen is not None:
            seen.since_ns = now_ns

    def io_hangs(self, name: str, now_ns: int) -> bool:
        """Whether an I/O worker with reads to do has made none for too long."""
        return self._idle_ns(name, now_ns) > IO_HANG_NS

    def compute_hangs(self, name: str, now_ns: int) -> bool:
        """Whether a running step has not moved for too long."""
        limit = max(COMPUTE_HANG_NS, COMPUTE_HANG_FACTOR * self._slowest_ns.get(name, 0))
        return self._idle_ns(name, now_ns) > limit

    def compute_loops(self, name: str, now_ns: int) -> bool:
        """Whether a step that keeps the processor busy has come to no end of a layer for too long.

        `name` is that of an observation of layers alone.
        """
        return self._idle_ns(name, now_ns) > COMPUTE_BUSY_NS

    def http_hangs(self, name: str, now_ns: int) -> bool:
        """Whether the process that talks to clients has not moved for too long."""
        return self._idle_ns(name, now_ns) > HTTP_HANG_NS

    def start_hangs(self, name: str, now_ns: int) -> bool:
        """Whether a process that is not ready yet has shown nothing for too long."""
        return self._idle_ns(name, now_ns) > START_HANG_NS

    def _idle_ns(self, name: str, now_ns: int) -> int:
        seen = self._seen.get(name)
        return now_ns - seen.since_ns if seen else 0
