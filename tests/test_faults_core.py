"""Faults as scripts of events for the decision core: no slot is lost, no request is forgotten."""

from collections import Counter

import pytest
from chaos import World
from simulation import engine, need

from coordinator.core.slots import SlotState
from coordinator.core.state import FromCompute, FromReader, ReaderCondemned, ReaderDied, ReaderReady
from shm.messages import Release, SlabsReady, SlotLease


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


def test_a_condemned_reader_gets_no_more_and_is_condemned_once() -> None:
    run = engine(1, 8, 8, n_readers=2)
    run.handle(FromCompute(need(0, [1, 2])))
    run.handle(ReaderCondemned("io0"))
    run.handle(ReaderCondemned("io0"))
    before = list(run.under_way["io0"])
    run.core.residency.abort_layer()
    run.handle(FromCompute(need(0, [3, 4, 5])))
    assert run.under_way["io0"] == before
    run.handle(ReaderCondemned("nobody"))


def test_a_need_behind_reads_of_a_condemned_reader_waits_for_their_slots() -> None:
    """Both slots of a smallest pool are being filled for a step that was cancelled."""
    run = engine(1, 8, 2, n_readers=1)
    run.handle(FromCompute(need(0, [1, 2])))
    run.core.residency.abort_layer()
    run.handle(ReaderCondemned("io0"))
    run.handle(FromCompute(need(0, [3])))
    run.under_way["io0"] = []
    run.handle(ReaderDied("io0"))
    run.handle(ReaderReady("io0", 2))
    while any(run.under_way.values()):
        run.complete_some_read()
    assert run.core.residency.slots.find((0, 3)) is not None


def test_what_is_given_back_twice_is_given_back_once() -> None:
    run = engine(1, 8, 4)
    held = run.run_layer(need(0, [1, 2]))[1]
    assert len(held) == 2
    for _ in range(2):
        run.handle(FromCompute(Release((*held, *held))))
    run.core.check()
    assert run.core.residency.slots.count(SlotState.READY) == 2
    run.run_layer(need(0, [3, 4, 5, 6]))
    run.core.check()


def test_two_experts_a_layer_and_too_few_slots_do_not_stand() -> None:
    """A layer's share is two slots at least; that alone does not keep its experts resident."""
    run = engine(5, 2, 8)
    held: tuple[SlotLease, ...] = ()
    for layer in range(5):
        _, held = run.run_layer(need(layer, [0, 1], released=held))
    run.inbox.clear()
    run.handle(FromCompute(need(4, [0, 1], released=held)))
    assert not any(grant.standing for grant in run.inbox)


@pytest.mark.parametrize("seed", range(40))
def test_chaos(seed: int) -> None:
    """Whatever happens: every request ends once, and no slot is lost, leaked or changed in use."""
    world = World(seed)
    for _ in range(700):
        world.turn()
    world.settle()
    assert dict(world.ends) == dict.fromkeys(range(1, world.n_requests + 1), 1)
    slots = world.core.residency.slots
    at_rest = (SlotState.FREE, SlotState.READY, SlotState.ADOPTED, SlotState.RETIRED)
    assert all(slot.state in at_rest for slot in slots.slots)
    assert all(slot.pins == 0 for slot in slots.slots)


def test_chaos_is_chaotic_enough() -> None:
    """Every kind of event happens in the runs above, and often."""
    happened: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed)
        for _ in range(700):
            world.turn()
        happened += world.happened
    assert min(happened.values()) >= 15, happened
    assert len(happened) == 20, happened
