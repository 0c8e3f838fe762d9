"""How large the pool should be while memory gets short and when there is enough again. Pure.

Judged from the room: what may still be allocated before the limit (see `memory_room`). A run that
uses its whole budget leaves `spare_bytes` of it. When somebody else takes more than half of that,
or is about to, the pool gives up what brings the room back above `high`, and what they will take
meanwhile. When the room stayed above `high` for a while, the pool grows back in small steps, as far
as the room stays above `high` with each of them. Programs hold a little more memory as time goes
by, and `high` may lie closer to `spare` than that: so that the pool does not stay a slot short for
good, the last step may leave less, when there was room for it for some time. If that turns out to
have been too early, the next time is later.

    room:  0 ....... low ....... high ....... spare
             shrink        stay         grow

Nobody waits for us: over the limit the kernel kills. A program takes up to a gigabyte a second, our
loop may wait for a core for some 50 ms while it does, and giving back is no faster than taking. So
`low` is a good part of the spare room, and what others took since the last look is taken to go on.
"""

MiB = 1024 * 1024
LARGEST_SPARE_BYTES = 256 * MiB  # more room than this need not be kept free
# `low` is half of the spare room, at least so much where there is more of it; a large pool can give
# more of itself for safety than a small one
LOW_BYTES, LOW_SHARE_OF_POOL = 64 * MiB, 24
SMALLEST_LOW_BYTES, SMALLEST_HIGH_BYTES = 8 * MiB, 12 * MiB  # a budget that leaves less gives pool
SHRINK_BYTES = 32 * MiB  # at least: each step costs a system call and a line of pages to read
MUCH_TAKEN_BYTES = 8 * MiB  # between two looks: less comes and goes
LOOKAHEAD_SECONDS = 0.25  # of what others take: until the next steps have had their effect
GROW_BYTES = 32 * MiB  # allocating so much keeps the coordinator busy for some 50 ms
GROW_STEPS = 32  # at most, from nothing to all: with `GROW_SECONDS` some 16 s
GROW_SECONDS = 0.5  # between two steps
QUIET_SECONDS = 5.0  # of enough room before the pool grows
LAST_STEP_QUIET_SECONDS = 20.0  # before a step that leaves less than `high`; doubled if too early


class Pressure:
    """The judgement of one run. `full_bytes` and `smallest_bytes` are those of its pool, and
    `unit_bytes` is the least that it can grow by."""

    def __init__(
        self, full_bytes: int, smallest_bytes: int, unit_bytes: int, spare_bytes: int
    ) -> None:
        spare = min(LARGEST_SPARE_BYTES, spare_bytes)
        wanted = max(spare // 2, min(LOW_BYTES, full_bytes // LOW_SHARE_OF_POOL))
        self.low_bytes = max(SMALLEST_LOW_BYTES, min(wanted, spare * 3 // 4))
        high = max(spare * 3 // 4, self.low_bytes * 5 // 4)
        self.high_bytes = max(SMALLEST_HIGH_BYTES, min(high, spare * 9 // 10))
        self._full_bytes = full_bytes
        self._smallest_bytes = smallest_bytes
        self._step_bytes = max(GROW_BYTES, full_bytes // GROW_STEPS, unit_bytes)
        self._grow_at: float | None = None  # when the pool may grow next; None: not before a shrink
        self._last_step_at: float | None = None  # for the step that leaves less than `high`
        self._last_step_quiet_seconds = LAST_STEP_QUIET_SECONDS
        self._leaves_less = False  # the pool is whole by such a step
        self._last: tuple[float, int] | None = None  # the last look: when, and room + ours

    def target(
        self, room_bytes: int, pool_bytes: int, own_bytes: int, now_seconds: float
    ) -> int | None:
        """Bytes that the pool should have, None for those it has. `own_bytes` are those of all our
        processes, the pool among them."""
        taken_meanwhile = self._taken_meanwhile(room_bytes + own_bytes, now_seconds)
        if room_bytes - taken_meanwhile < self.low_bytes:
            self._grow_at, self._last_step_at = now_seconds + QUIET_SECONDS, None
            if self._leaves_less:
                self._leaves_less = False
                self._last_step_quiet_seconds *= 2
            missing = max(SHRINK_BYTES, self.high_bytes - room_bytes + taken_meanwhile)
            target = max(self._smallest_bytes, pool_bytes - missing)
            return target if target < pool_bytes else None
        if pool_bytes >= self._full_bytes:
            return None
        if self._may_be_whole(room_bytes, self._full_bytes - pool_bytes, now_seconds):
            self._leaves_less = True
            return self._full_bytes
        if self._grow_at is None or room_bytes <= self.high_bytes:
            self._grow_at = now_seconds + QUIET_SECONDS
            return None
        if now_seconds < self._grow_at:
            return None
        self._grow_at = now_seconds + GROW_SECONDS
        step = min(self._step_bytes, room_bytes - self.high_bytes)
        return min(self._full_bytes, pool_bytes + step)

    def _may_be_whole(self, room_bytes: int, missing_bytes: int, now_seconds: float) -> bool:
        """Whether the last step is due that leaves the room between `low` and `high`."""
        least = (self.low_bytes + self.high_bytes) // 2
        if missing_bytes > self._step_bytes or room_bytes - missing_bytes < least:
            self._last_step_at = None
            return False
        if self._last_step_at is None:
            self._last_step_at = now_seconds + self._last_step_quiet_seconds
        return now_seconds >= self._last_step_at

    def _taken_meanwhile(self, left_bytes: int, now_seconds: float) -> int:
        """What others will take during `LOOKAHEAD_SECONDS` if they go on as since the last look."""
        last, self._last = self._last, (now_seconds, left_bytes)
        if last is None or now_seconds <= last[0]:
            return 0
        taken = last[1] - left_bytes
        if taken < MUCH_TAKEN_BYTES:
            return 0
        return int(taken / (now_seconds - last[0]) * LOOKAHEAD_SECONDS)
