"""How long at least one of many spans lasted, as they come: the time in which the disk had work.

Reads run side by side and answer in another order than they began, so their spans overlap and come
late. The last few that were merged are kept; what is older cannot be reached by a new one any more,
since a reader has few reads under way.
"""

MAX_KEPT = 64  # merged spans: far more than readers have reads under way


class BusyTime:
    """Length of the union of spans on one clock."""

    def __init__(self) -> None:
        self._done_ns = 0  # of spans that were let go
        self._kept: list[tuple[int, int]] = []  # ascending, apart from each other

    @property
    def total_ns(self) -> int:
        """Of all spans so far."""
        return self._done_ns + sum(stop - start for start, stop in self._kept)

    def add(self, start_ns: int, stop_ns: int) -> None:
        """One more span, half-open."""
        first = len(self._kept)
        while first and self._kept[first - 1][1] >= start_ns:
            first -= 1
        last = first
        while last < len(self._kept) and self._kept[last][0] <= stop_ns:
            start_ns = min(start_ns, self._kept[last][0])
            stop_ns = max(stop_ns, self._kept[last][1])
            last += 1
        self._kept[first:last] = [(start_ns, stop_ns)]
        if len(self._kept) > MAX_KEPT:
            start_ns, stop_ns = self._kept.pop(0)
            self._done_ns += stop_ns - start_ns
