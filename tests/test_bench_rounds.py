"""The order of blocks, what is done already, and the end of the time."""

import time

import pytest

from coordinator.bench.block import Participant
from coordinator.bench.records import Record
from coordinator.bench.rooms import Room
from coordinator.bench.rounds import Step, TimeLimit, complete_rounds, order_of_round, run_rounds
from coordinator.bench.timings import Timings

ROOMS = (Room("small"), Room("large"))


def nobody(name: str) -> Participant:
    return Participant(name, "test", lambda room, prompt, seed: [], lambda seen: Timings(None, ()))


WHO = [nobody(name) for name in "AB"]


def test_rounds_run_there_and_back() -> None:
    orders = [
        " ".join(f"{room.name[0]}{each.name}" for room, each in order_of_round(ROOMS, WHO, number))
        for number in range(3)
    ]
    assert orders == ["sA sB lA lB", "lB lA sB sA", "sA sB lA lB"]


def record_of(step: Step, deadline: float | None) -> Record:
    n_round, room, each = step
    return {"round": n_round, "room": room.name, "arm": each.name, "memory": {}}


def test_a_round_that_is_not_complete_is_run_again() -> None:
    """Blocks that are compared must have run together."""
    whole = [record_of((0, room, each), None) for room in ROOMS for each in WHO]
    part = [record_of((1, ROOMS[1], each), None) for each in WHO]
    failed = [{**found, "round": 2} for found in whole]
    failed[1] = failed[1] | {"error": "exit 9"}
    killed = [{**found, "round": 3} for found in whole]
    killed[1] = killed[1] | {"error": "exit -9", "memory": {"oom_kills": 1}}
    done = complete_rounds([*whole, *part, *failed, *killed], ROOMS, WHO)
    assert done == {0, 3}
    found = [
        f"{each['round']}{each['room'][0]}{each['arm']}"
        for each in run_rounds(ROOMS, WHO, 5, done, TimeLimit(), record_of)
    ]
    assert " ".join(found) == "1lB 1lA 1sB 1sA 2sA 2sB 2lA 2lB 4sA 4sB 4lA 4lB"


def test_a_block_cut_short_ends_it() -> None:
    def run(step: Step, deadline: float | None) -> Record | None:
        return None if step[2].name == "B" else record_of(step, deadline)

    assert len(list(run_rounds(ROOMS, WHO, 2, (), TimeLimit(), run))) == 1


@pytest.mark.alone
@pytest.mark.parametrize(("seconds", "n_rounds"), [(0.0, 0), (0.35, 1), (0.75, 3)])
def test_no_round_is_begun_that_would_not_end_in_time(seconds: float, n_rounds: int) -> None:
    """Rounds of 0.2 s; without a number of rounds the time decides."""

    def run(step: Step, deadline: float | None) -> Record | None:
        assert deadline == limit.deadline
        time.sleep(0.05)
        return record_of(step, deadline)

    started = time.monotonic()
    limit = TimeLimit(started + seconds)
    records = list(run_rounds(ROOMS, WHO, None, (), limit, run))
    assert len(records) <= 4 * n_rounds and len(records) % 4 == 0
    assert n_rounds == 0 or records
