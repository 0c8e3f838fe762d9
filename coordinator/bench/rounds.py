"""The order of blocks, and how far the time goes.

Rounds run there and back: A B in each room, then B A. What drifts meanwhile (heat, other work, a
disk that slows down) falls on all arms alike. A round is begun only if one like those before would
end in time, so a limit never leaves pairs without their halves; blocks are whole or not recorded.
A round that an earlier run did not complete is run again from its start, for the same reason.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from coordinator.bench.block import Participant
from coordinator.bench.records import Record, has_failed
from coordinator.bench.rooms import Room

Step = tuple[int, Room, Participant]  # round, where, who
Run = Callable[[Step, float | None], Record | None]  # until the deadline; None: cut short


@dataclass(slots=True)
class TimeLimit:
    """Seconds on the monotonic clock; None: no limit. Knows how long each block took."""

    deadline: float | None = None
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def left(self) -> float | None:
        """Seconds that are left."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def add(self, room: str, arm: str, seconds: float) -> None:
        """A block took so long, from drop to record."""
        self.seconds.setdefault((room, arm), []).append(seconds)

    def allows(self, steps: Sequence[Step]) -> bool:
        """Whether these blocks would end in time; what was never run is thought to take none."""
        left = self.left()
        if left is None:
            return True
        known = [self.seconds.get((room.name, who.name)) for _, room, who in steps]
        return left > sum(median(found) for found in known if found)


def order_of_round(
    rooms: Sequence[Room], who: Sequence[Participant], n_round: int
) -> list[tuple[Room, Participant]]:
    """A B in every room, then all the way back."""
    there = [(room, each) for room in rooms for each in who]
    return there if n_round % 2 == 0 else there[::-1]


def complete_rounds(
    records: Iterable[Record], rooms: Sequence[Room], who: Sequence[Participant]
) -> set[int]:
    """Rounds of which every block is there and none has to be measured again."""
    there: dict[int, set[tuple[str, str]]] = {}
    for record in records:
        if not has_failed(record):
            there.setdefault(record["round"], set()).add((record["room"], record["arm"]))
    wanted = {(room.name, each.name) for room in rooms for each in who}
    return {n_round for n_round, found in there.items() if wanted <= found}


def run_rounds(
    rooms: Sequence[Room],
    who: Sequence[Participant],
    n_rounds: int | None,
    done: Collection[int],
    limit: TimeLimit,
    run: Run,
) -> Iterator[Record]:
    """Records of all rounds that are not `done`, as they end. Ends early when `run` is cut short.

    `n_rounds` None: until the time is over.
    """
    n_round = 0
    while n_rounds is None or n_round < n_rounds:
        order = order_of_round(rooms, who, n_round) if n_round not in done else []
        steps: list[Step] = [(n_round, room, each) for room, each in order]
        if not limit.allows(steps):
            return
        for step in steps:
            _, room, each = step
            started = time.monotonic()
            left = limit.left()
            if left is not None and left <= 0:
                return
            record = run(step, limit.deadline)
            if record is None:
                return
            limit.add(room.name, each.name, time.monotonic() - started)
            yield record
        n_round += 1
