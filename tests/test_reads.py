"""The queue of reads: what a layer waits for comes first."""

import pytest
from simulation import Engine, engine, need

from coordinator.core.actions import ToWorker
from coordinator.core.reads import ReadDispatch
from coordinator.core.state import FromCompute, FromReader
from shm.messages import SlabRead, SlabsReady, SlotLease


def reads_of(*slots: int) -> list[SlabRead]:
    return [SlabRead(SlotLease(slot, 1), 0, slot, ()) for slot in slots]


def order_of(queue: ReadDispatch) -> list[int]:
    """Slots, as a reader that takes one at a time is told to fill them."""
    queue.add_reader("io0", 1)
    order = []
    while actions := queue.dispatch():
        (told,) = actions
        assert isinstance(told, ToWorker)
        (read,) = told.message.reads
        order.append(read.lease.slot)
        assert queue.answered("io0", read.lease)
    assert queue.n_loading == 0
    return order


def test_what_is_read_ahead_comes_last() -> None:
    queue = ReadDispatch()
    queue.push_ahead(reads_of(1, 2))
    queue.demand(lambda: {3, 4}, reads_of(3, 4))
    queue.push(reads_of(5))  # follows into a slot that came free
    queue.push_front(reads_of(6))
    assert queue.n_loading == 6
    assert order_of(queue) == [6, 3, 4, 5, 1, 2]


def test_what_was_read_ahead_and_is_needed_comes_first() -> None:
    queue = ReadDispatch()
    queue.push_ahead(reads_of(1, 2, 3, 4))
    queue.demand(lambda: {2, 4, 5}, reads_of(5))
    assert order_of(queue) == [2, 4, 5, 1, 3]


def test_nobody_waits_for_what_the_layer_before_waited_for() -> None:
    queue = ReadDispatch()
    queue.demand(lambda: {1, 2}, reads_of(1, 2))
    queue.demand(lambda: {2, 3}, reads_of(3))
    assert order_of(queue) == [2, 3, 1]


def preloading(n_slots: int) -> Engine:
    """Layer 0 of two is read ahead, one expert at a time."""
    run = engine(2, 8, n_slots, n_readers=1, credit=1)
    residency = run.core.residency
    (told,) = residency.preload([key for key in residency.geometry.all_keys() if key[0] == 0])
    assert isinstance(told, ToWorker)
    run.under_way["io0"].extend(told.message.reads)
    assert residency.n_loading == 8
    return run


def read_next(run: Engine) -> tuple[int, int]:
    """The read under way ends; what is read then."""
    (read,) = run.under_way["io0"]
    run.under_way["io0"].clear()
    run.handle(FromReader("io0", SlabsReady(read.lease, 1, 2, 0, 0)))
    (read,) = run.under_way["io0"]
    return read.layer, read.expert


@pytest.mark.parametrize(
    ("layer", "experts", "n_slots"),
    [(1, [2, 5], 12), (0, [5, 7], 12), (0, [0, 6, 7], 8)],
    ids=["new", "queued", "one of them under way"],
)
def test_a_need_overtakes_what_is_read_ahead(layer: int, experts: list[int], n_slots: int) -> None:
    run = preloading(n_slots)
    run.handle(FromCompute(need(layer, experts)))
    wanted = [(layer, expert) for expert in experts if (layer, expert) != (0, 0)]
    assert [read_next(run) for _ in wanted] == wanted
    assert read_next(run) == (0, 1)


def test_a_slot_that_a_need_waits_for_is_filled_first() -> None:
    """Reads ahead have every slot: its experts come after them, and theirs need not all end."""
    run = preloading(8)
    run.handle(FromCompute(need(1, [3])))
    assert read_next(run) == (1, 3)
