"""Faults as scripts of events for the decision core: no slot is lost, no request is forgotten."""

from simulation import engine, need

from coordinator.slots import SlotState
from coordinator.state import FromCompute, FromReader, ReaderCondemned, ReaderDied
from shm.messages import SlabsReady


def test_an_answer_between_the_verdict_and_the_death_loses_no_slot() -> None:
    run = engine(1, 8, 4, n_readers=2)
    run.handle(FromCompute(need(0, [1, 2])))
    name = next(name for name, reads in run.under_way.items() if reads)
    read = run.under_way[name][0]
    run.handle(ReaderCondemned(name))
    late = SlabsReady(read.lease, 1, 2, 3, 0)
    assert run.handle(FromReader(name, late)) == []
    assert run.core.residency.slots.slots[read.lease.slot].state is SlotState.CONDEMNED
    run.under_way[name] = []
    run.handle(ReaderDied(name))
    while any(run.under_way.values()):
        run.complete_some_read()
    assert run.core.residency.slots.count(SlotState.READY) == 2
    assert run.core.residency.slots.count(SlotState.FREE) == 2
