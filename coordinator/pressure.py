"""How large the pool should be while memory gets short and when there is enough again. Pure.

Judged from the room: what may still be allocated before the limit (see `memory_room`). A run that
uses its whole budget leaves `spare_bytes` of it. When somebody else takes more than half of that,
the pool gives up what brings the room back above `high`, and what they will take meanwhile. When
the room stayed above `high` for a while, the pool grows back in small steps, as far as the room
stays above `high` with each of them.

    room:  0 ....... low ....... high ....... spare      low = spare / 2, high = spare * 3 / 4
             shrink        stay         grow
"""

MiB = 1024 * 1024
# The other program may take a gigabyte a second, and a look is due every 20 ms: with less room than
# this it gets to the limit before we see it coming. A budget that leaves less loses some pool.
LOWEST_BYTES, LOWEST_HIGH_BYTES = 32 * MiB, 44 * MiB
LARGEST_SPARE_BYTES = 256 * MiB  # more room than this need not be kept free
SHRINK_BYTES = 32 * MiB  # at least: each step costs a system call and a line of pages to read
LOOKAHEAD_SECONDS = 0.25  # of what others take: until the next steps have had their effect
GROW_BYTES = 32 * MiB  # allocating so much keeps the coordinator busy for some 50 ms
GROW_STEPS = 32  # at most, from nothing to all: with `GROW_SECONDS` some 16 s
GROW_SECONDS = 0.5  # between two steps
QUIET_SECONDS = 5.0  # of enough room before the pool grows


class Pressure:
    """The judgement of one run. `full_bytes` and `smallest_bytes` are those of its pool, and
    `unit_bytes` is the least that it can grow by."""

    def __init__(
        self, full_bytes: int, smallest_bytes: int, unit_bytes: int, spare_bytes: int
    ) -> None:
        spare = min(LARGEST_SPARE_BYTES, spare_bytes)
        self.low_bytes = max(LOWEST_BYTES, spare // 2)
        self.high_bytes = max(LOWEST_HIGH_BYTES, spare * 3 // 4)
        self._full_bytes = full_bytes
        self._smallest_bytes = smallest_bytes
        self._step_bytes = max(GROW_BYTES, full_bytes // GROW_STEPS, unit_bytes)
        self._grow_at: float | None = None  # when the pool may grow next; None: not before a shrink
        self._last: tuple[float, int] | None = None  # the last look: when, and room + pool

    def target(self, room_bytes: int, pool_bytes: int, now_seconds: float) -> int | None:
        """Bytes that the pool should have, None for those it has."""
        taken_meanwhile = self._taken_meanwhile(room_bytes + pool_bytes, now_seconds)
        if room_bytes < self.low_bytes:
            self._grow_at = now_seconds + QUIET_SECONDS
            missing = max(SHRINK_BYTES, self.high_bytes - room_bytes + taken_meanwhile)
            target = max(self._smallest_bytes, pool_bytes - missing)
            return target if target < pool_bytes else None
        if pool_bytes >= self._full_bytes:
            return None
        if self._grow_at is None or room_bytes <= self.high_bytes:
            self._grow_at = now_seconds + QUIET_SECONDS
            return None
        if now_seconds < self._grow_at:
            return None
        self._grow_at = now_seconds + GROW_SECONDS
        step = min(self._step_bytes, room_bytes - self.high_bytes)
        return min(self._full_bytes, pool_bytes + step)

    def _taken_meanwhile(self, left_bytes: int, now_seconds: float) -> int:
        """What others will take during `LOOKAHEAD_SECONDS` if they go on as since the last look."""
        last, self._last = self._last, (now_seconds, left_bytes)
        if last is None or now_seconds <= last[0]:
            return 0
        taken = max(0, last[1] - left_bytes)
        return int(taken / (now_seconds - last[0]) * LOOKAHEAD_SECONDS)
